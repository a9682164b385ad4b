"""Train, evaluate, predict and resume with Transformers' Trainer, on one device or on ranks that share sequences."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import peft
import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from torch.utils.data import DataLoader, IterableDataset
from transformers import (
    AutoModelForCausalLM,
    DataCollatorWithFlattening,
    PreTrainedModel,
    Trainer,
    TrainingArguments,
    set_seed,
)
from transformers.trainer_utils import EvalPrediction

from burst_portable.integrations.accelerate import SequenceParallelism
from burst_portable.integrations.trainer import SequenceTrainer
from tests.support.models import make

RANKS = 4
LENGTHS = (15, 22, 9, 31, 12, 17, 26, 40, 11, 23, 19, 35)  # ragged rows, which no number of ranks divides
LORA: dict[str, Any] = {"target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM", "init_lora_weights": False}

STEADY: dict[str, Any] = {"adam_epsilon": 1e-5}
"""Otherwise Adam turns the rounding of gradients near zero into steps."""
CHECKPOINTING: dict[str, Any] = {"activation_checkpointing": True}
USUAL: dict[str, dict[str, Any]] = {"two sequences": {"cp_size": 2}}
FULL: dict[str, dict[str, Any]] = {
    "one sequence": {"cp_size": 4, **STEADY},
    "adapters": {"cp_size": 4, "kind": "lora"},
    "adapters, two sequences": {"cp_size": 2, "kind": "lora"},
    "checkpointing": {"cp_size": 2, **CHECKPOINTING},
    "checkpointed adapters": {"cp_size": 4, "kind": "lora", **CHECKPOINTING},
    "compiled": {"ranks": 2, "cp_size": 2, "torch_compile": True, "torch_compile_backend": "eager", **STEADY},
    "label smoothing": {"cp_size": 2, "label_smoothing_factor": 0.1},
    "experts": {"cp_size": 4, "kind": "mixtral"},
    "streamed": {"cp_size": 2, "streamed": True},
    "average of ranks": {"cp_size": 4, "average_tokens_across_devices": False, **STEADY},
    "rows without labels": {"ranks": 2, "cp_size": 2, "unlabelled": True},
    "labels at borders": {"ranks": 2, "cp_size": 2, "packed": True, **STEADY},
    "older": {"ranks": 2, "cp_size": 2, "older": True},
    "older, two sequences": {"cp_size": 2, "older": True},
    "older, average of ranks": {
        "ranks": 2,
        "cp_size": 2,
        "older": True,
        "average_tokens_across_devices": False,
        **STEADY,
    },
}
"""Options of `results`, by case."""


def rows(count: int) -> list[dict[str, list[int]]]:
    """Return rows whose first third has no labels, as a prompt."""
    generator = torch.Generator().manual_seed(3)
    ids = [torch.randint(3, 64, (n,), generator=generator).tolist() for n in LENGTHS[:count]]
    return [{"input_ids": row, "labels": [-100] * (len(row) // 3) + row[len(row) // 3 :]} for row in ids]


class Stream(IterableDataset[Any]):
    """A dataset without a length."""

    def __iter__(self) -> Iterator[dict[str, list[int]]]:
        return iter(rows(12))


def without_labels(examples: list[dict[str, list[int]]]) -> list[dict[str, list[int]]]:
    """Return rows of which two thirds have no label, as prompts whose answer was cut off."""
    return [x if i % 3 == 0 else x | {"labels": [-100] * len(x["labels"])} for i, x in enumerate(examples)]


def pad(examples: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    """Return a batch padded at the end of rows."""
    longest = max(len(example["input_ids"]) for example in examples)
    columns: dict[str, list[list[int]]] = {"input_ids": [], "labels": [], "attention_mask": []}
    for example in examples:
        missing = longest - len(example["input_ids"])
        columns["input_ids"].append(example["input_ids"] + [0] * missing)
        columns["labels"].append(example["labels"] + [-100] * missing)
        columns["attention_mask"].append([1] * (longest - missing) + [0] * missing)
    return {name: torch.tensor(column) for name, column in columns.items()}


def pack(examples: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    """Return one row of documents, whose first tokens have labels, as no collator of Transformers gives them."""
    batch = DataCollatorWithFlattening()(examples)
    return {**batch, "labels": batch["input_ids"]}


def logits_of(prediction: Any) -> Any:
    """Return the logits of a prediction. That of a mixture of experts has its router loss and logits as well."""
    found = prediction.predictions
    return next(x for x in found if x.ndim == 3) if isinstance(found, tuple) else found


def predicted_labels(prediction: EvalPrediction) -> dict[str, float]:
    """Return the number of labels, and the mean logit at them."""
    is_label = prediction.label_ids != -100
    picked = logits_of(prediction)[is_label][:, 5]
    return {"labels": float(is_label.sum()), "logit": float(picked.mean())}


def forget_accelerator() -> None:
    """Let the next accelerator of this process have another configuration."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


class OlderTrainer(Trainer):
    """Trainer that counts labels as transformers before 5.19: divided by the ranks of a sequence, and rounded down."""

    def _get_num_items_in_batch(self, *arguments: Any, **named: Any) -> Any:
        config = self.accelerator.parallelism_config
        if config is None:
            return super()._get_num_items_in_batch(*arguments, **named)
        divisor = config.non_data_parallel_size
        with config.counting_every_rank():  # if the installed version divides, too
            count = super()._get_num_items_in_batch(*arguments, **named)
        return count if count is None else count // divisor


class OlderSequenceTrainer(SequenceTrainer, OlderTrainer):
    """SequenceTrainer with an older version of Trainer."""


def make_trainer(
    folder: Path,
    parallelism: SequenceParallelism | None,
    model: Any,
    *,
    batch: int,
    held_out: int,
    streamed: bool = False,
    packed: bool = False,
    unlabelled: bool = False,
    older: bool = False,
    **settings: Any,
) -> Any:
    """Return a trainer of three steps of two batches. Without `parallelism`: Transformers' own."""
    forget_accelerator()
    args = TrainingArguments(
        output_dir=str(folder),
        parallelism_config=parallelism,
        max_steps=3,
        per_device_train_batch_size=batch,
        per_device_eval_batch_size=batch,
        gradient_accumulation_steps=2,
        learning_rate=3e-3,
        logging_steps=1,
        save_steps=2,
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        include_num_input_tokens_seen="all",
        ddp_find_unused_parameters=False,
        **settings,
    )
    is_routed = model.config.model_type == "mixtral"  # the router loss would count padding
    data = {
        "data_collator": DataCollatorWithFlattening() if is_routed else pack if packed else pad,
        "train_dataset": Stream() if streamed else without_labels(rows(12)) if unlabelled else rows(12),
        "eval_dataset": rows(held_out),
    }
    sharing: type[Trainer] = OlderSequenceTrainer if older else SequenceTrainer
    trainer_class = Trainer if parallelism is None else sharing
    return trainer_class(model=model, args=args, compute_metrics=predicted_labels, **data)


def model_of(kind: str) -> Any:
    """Return "llama", "lora": Llama with adapters, or "mixtral" with a router loss."""
    if kind == "mixtral":
        return make("mixtral", torch.float32, output_router_logits=True)
    model = make("llama", torch.float32)
    return peft.get_peft_model(model, peft.LoraConfig(**LORA)) if kind == "lora" else model


def results(
    folder: Path, cp_size: int, *, ranks: int = RANKS, alone: bool = False, kind: str = "llama", **settings: Any
) -> Any:
    """Return the numbers and tensors that a user of Trainer sees, by name.

    `alone`: On one device, with the rows of all data-parallel ranks in a batch.
    """
    replicas = ranks // cp_size
    parallelism = None if alone else SequenceParallelism(cp_size)
    # The last batches are smaller than others, or would repeat rows.
    options = {"batch": 2 * replicas if alone else 2, "held_out": 12 if replicas > 1 else 11, **settings}
    trainer = make_trainer(folder, parallelism, model_of(kind), **options)
    before = trainer.evaluate()["eval_loss"]  # as programs do, for comparison
    trainer.train()
    steps = [entry for entry in trainer.state.log_history if "loss" in entry]
    evaluated, predicted = trainer.evaluate(), trainer.predict(rows(options["held_out"] - 4))
    found = {
        "loss": [entry["loss"] for entry in steps],
        "grad_norm": [entry["grad_norm"] for entry in steps],
        "evaluated": [evaluated[f"eval_{name}"] for name in ("loss", "labels", "logit")],
        "evaluated before": before,
        "evaluation steps": [steps_of(evaluated, "eval"), steps_of(predicted.metrics, "test")],
        "predicted loss": predicted.metrics["test_loss"],
        "labels": torch.from_numpy(predicted.label_ids),
        "logits": torch.from_numpy(logits_of(predicted))[torch.from_numpy(predicted.label_ids) != -100],
        "rows of a step": trainer.get_total_train_batch_size(trainer.args),
        "weights": weights(trainer.model),
    }
    if replicas == 1:  # otherwise rows are padded to another length
        found["tokens and FLOPs"] = [trainer.state.num_input_tokens_seen, trainer.state.total_flos]
    resumed = make_trainer(folder, parallelism, model_of(kind), **options)
    resumed.train(resume_from_checkpoint=str(folder / "checkpoint-2"))
    found["resumed"] = weights(resumed.model)
    last = str(folder / "checkpoint-3")
    if isinstance(resumed.model, PreTrainedModel):
        found["loaded"] = weights(AutoModelForCausalLM.from_pretrained(last))
    else:
        found["loaded"] = weights(peft.PeftModel.from_pretrained(make("llama", torch.float32), last, is_trainable=True))
    return found


def steps_of(metrics: dict[str, float], prefix: str) -> int:
    return round(metrics[f"{prefix}_steps_per_second"] * metrics[f"{prefix}_runtime"])


def resumed_alone(folder: Path, **options: Any) -> dict[str, torch.Tensor]:
    """Return the weights after resuming a run of several ranks on one device."""
    trainer = make_trainer(folder, None, model_of("llama"), **options)
    trainer.train(resume_from_checkpoint=str(folder / "checkpoint-2"))
    return weights(trainer.model)


def restored_draws(folder: Path, rank: int) -> list[float]:
    """Return what the generators of a rank draw after it restored the checkpoint of a job without rank 1.

    Two ranks share each of two sequences. Sequence s is saved with generators seeded by 100 + s.
    """
    options: dict[str, Any] = {"batch": 2, "held_out": 4}
    trainer = make_trainer(folder, SequenceParallelism(2), model_of("llama"), **options)
    folder.mkdir(exist_ok=True)
    set_seed(100 + rank // 2)
    trainer._save_rng_state(str(folder))
    if rank == 1:
        (folder / "rng_state_1.pth").unlink()
    dist.barrier()
    set_seed(7)
    trainer._load_rng_state(str(folder))
    return drawn_numbers()


def drawn_numbers() -> list[float]:
    """Return the next number of each generator."""
    return [random.random(), np.random.rand(), torch.rand(()).item()]


def accelerate_loop(parallelism: SequenceParallelism | None, *, is_sharded: bool = True) -> dict[str, Any]:
    """Return the losses and weights of an epoch as in accelerate's guide, with accumulation and shuffled rows."""
    forget_accelerator()
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True, parallelism_config=parallelism, gradient_accumulation_steps=2)
    model = make("llama", torch.float32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(rows(12), batch_size=2, collate_fn=pad, shuffle=True)  # type: ignore[arg-type]
    if parallelism is not None and is_sharded:
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
        losses.append(accelerator.gather(loss.detach()).mean().item())
    found = {"losses": losses, "weights": weights(accelerator.unwrap_model(model))}
    return found | evaluated_rows(accelerator, parallelism, model)


def evaluated_rows(accelerator: Accelerator, parallelism: SequenceParallelism | None, model: Any) -> dict[str, Any]:
    """Return losses of rows, and objects, as an own loop gathers them. The last batch has one row."""
    gather = accelerator.gather_for_metrics if parallelism is None else parallelism.gather_for_metrics
    loader = accelerator.prepare(DataLoader(rows(7), batch_size=2, collate_fn=pad))  # type: ignore[arg-type]
    found: dict[str, list[Any]] = {"row losses": [], "row names": [], "as of accelerate": []}
    model.eval()
    for batch in loader:
        with torch.no_grad():
            logits = model(**{name: x for name, x in batch.items() if name != "labels"}).logits
        of_tokens = torch.nn.functional.cross_entropy(logits[:, :-1].mT, batch["labels"][:, 1:], reduction="none")
        found["row losses"].append(gather({"loss": of_tokens.sum(dim=1)})["loss"])
        found["row names"] += gather([str(row[:3].tolist()) for row in batch["input_ids"]])
        found["as of accelerate"].append(accelerator.gather_for_metrics(of_tokens.sum(dim=1)))
    return found | {name: torch.cat(found[name]) for name in ("row losses", "as of accelerate")}


def weights(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return trainable parameters by name."""
    return {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}
