"""Run one rank of tests/device/test_accelerate.py: train under accelerate and Trainer, with DDP and FSDP2.

python -m tests.support.device_accelerate FOLDER RANK RANKS ddp|fsdp2

One rank trains without this library, each case of both.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.state import AcceleratorState, GradientState
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from burst_portable.integrations.accelerate import SequenceParallelism
from burst_portable.integrations.trainer import SequenceTrainer
from tests.support.device_programs import join, start

LAYER = "LlamaDecoderLayer"
LENGTHS = (155, 222, 91, 313, 120, 178, 264, 401)
"""Tokens of each row, of which batches have two."""


def rows() -> list[dict[str, list[int]]]:
    """Return rows whose first third has no labels, as a prompt."""
    generator = torch.Generator().manual_seed(3)
    ids = [torch.randint(3, 256, (n,), generator=generator).tolist() for n in LENGTHS]
    return [{"input_ids": row, "labels": [-100] * (len(row) // 3) + row[len(row) // 3 :]} for row in ids]


def pad(examples: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    """Return a batch padded at the end of rows."""
    longest = max(len(example["input_ids"]) for example in examples)
    columns: dict[str, list[list[int]]] = {"input_ids": [], "labels": [], "attention_mask": []}
    for example in examples:
        tokens, missing = len(example["input_ids"]), longest - len(example["input_ids"])
        columns["input_ids"].append(example["input_ids"] + [0] * missing)
        columns["labels"].append(example["labels"] + [-100] * missing)
        columns["attention_mask"].append([1] * tokens + [0] * missing)
    return {name: torch.tensor(column) for name, column in columns.items()}


def make() -> Any:
    """Return a model in float32, equal in every call."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 2, "num_key_value_heads": 1}
    return LlamaForCausalLM(LlamaConfig(vocab_size=256, num_hidden_layers=2, use_cache=False, **sizes)).train()


def weights(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    full = ((name, p.detach()) for name, p in model.named_parameters())
    return {name: (p.full_tensor() if isinstance(p, DTensor) else p).cpu().clone() for name, p in full}


def forget_accelerator() -> None:
    """Let the next accelerator of this process have another configuration."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def loop(device: torch.device, parallelism: SequenceParallelism | None, kind: str) -> dict[str, Any]:
    """Return the losses and weights of an epoch as in accelerate's guide, with accumulation and clipping."""
    forget_accelerator()
    plugin = None
    if kind == "fsdp2":
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2, auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=[LAYER]
        )
    accelerator = Accelerator(
        cpu=device.type == "cpu", parallelism_config=parallelism, fsdp_plugin=plugin, gradient_accumulation_steps=2
    )
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(rows(), batch_size=2, collate_fn=pad)  # type: ignore[arg-type]
    if parallelism is not None:
        parallelism.parallelize(model)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    losses = []
    for batch in loader:
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    return {"losses": losses, "weights": weights(accelerator.unwrap_model(model))}


def trained(device: torch.device, parallelism: SequenceParallelism | None, kind: str, folder: Path) -> dict[str, Any]:
    """Return what Transformers' Trainer logs in two steps and an evaluation, and the weights."""
    forget_accelerator()
    fsdp: dict[str, Any] = {"fsdp": "full_shard", "fsdp_config": {"version": 2, "transformer_layer_cls_to_wrap": LAYER}}
    args = TrainingArguments(
        output_dir=str(folder), parallelism_config=parallelism, max_steps=2, per_device_train_batch_size=2,
        per_device_eval_batch_size=2, gradient_accumulation_steps=2, learning_rate=0.1, optim="sgd", logging_steps=1,
        lr_scheduler_type="constant", save_strategy="no", report_to="none", disable_tqdm=True, bf16=False,
        use_cpu=device.type == "cpu", ddp_find_unused_parameters=False, **(fsdp if kind == "fsdp2" else {}),
    )  # fmt: skip
    trainer_class = Trainer if parallelism is None else SequenceTrainer
    data = {"data_collator": pad, "train_dataset": rows(), "eval_dataset": rows()[:5]}
    trainer = trainer_class(model=make(), args=args, **data)
    trainer.train()
    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    return {
        "losses": [entry["loss"] for entry in logged],
        "norms": [entry["grad_norm"] for entry in logged],
        "evaluated": [trainer.evaluate()["eval_loss"]],
        "weights": weights(trainer.accelerator.unwrap_model(trainer.model_wrapped)),
    }


def main(folder: Path, rank: int, ranks: int, kind: str) -> None:
    device = join(folder, rank, ranks)
    kind, name = ("alone", "alone") if ranks == 1 else (kind, f"{kind} {rank}")

    def sharing() -> SequenceParallelism | None:
        return None if ranks == 1 else SequenceParallelism()

    found = {"loop": loop(device, sharing(), kind), "trainer": trained(device, sharing(), kind, folder / name)}
    torch.save({**found, "initial": weights(make())}, folder / f"{name}.pt")


if __name__ == "__main__":
    start(main)
