"""Run one rank of tests/device/test_trl.py: supervised fine-tuning by TRL.

python -m tests.support.device_trl FOLDER RANK RANKS sft|packed

One rank trains without this library.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import trl
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from burst_portable.integrations.accelerate import SequenceParallelism
from burst_portable.integrations.trl import SequenceSFTTrainer
from tests.support.device_accelerate import LENGTHS, forget_accelerator, make, weights
from tests.support.device_programs import join, start


def tokenizer() -> PreTrainedTokenizerFast:
    words = {f"w{i}": i for i in range(253)} | {"<pad>": 253, "<eos>": 254, "<unk>": 255}
    made = Tokenizer(WordLevel(words, unk_token="<unk>"))
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


def completions() -> Dataset:
    """Return ragged rows, of which the last third is the completion."""
    generator = torch.Generator().manual_seed(3)
    ids = [torch.randint(0, 253, (n,), generator=generator).tolist() for n in LENGTHS]
    masks = [[0] * (len(row) - len(row) // 3) + [1] * (len(row) // 3) for row in ids]
    return Dataset.from_list([{"input_ids": x, "completion_mask": m} for x, m in zip(ids, masks, strict=True)])


def main(folder: Path, rank: int, ranks: int, kind: str) -> None:
    device = join(folder, rank, ranks)
    forget_accelerator()
    options: dict[str, Any] = {"packing": True, "max_length": 512} if kind == "packed" else {"max_length": None}
    args = trl.SFTConfig(
        output_dir=str(folder / f"{rank} of {ranks}"), parallelism_config=SequenceParallelism() if ranks > 1 else None,
        max_steps=2, per_device_train_batch_size=2, per_device_eval_batch_size=2, gradient_accumulation_steps=2,
        learning_rate=0.1, optim="sgd", lr_scheduler_type="constant", logging_steps=1, save_strategy="no",
        report_to="none", disable_tqdm=True, bf16=False, use_cpu=device.type == "cpu", ddp_find_unused_parameters=False,
        **options,
    )  # fmt: skip
    trainer_class = trl.SFTTrainer if ranks == 1 else SequenceSFTTrainer
    data = {"train_dataset": completions(), "eval_dataset": completions()}
    trainer = trainer_class(make(), args=args, processing_class=tokenizer(), **data)
    trainer.train()
    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    names = ("loss", "grad_norm", "num_tokens", "mean_token_accuracy")
    found: dict[str, Any] = {name: [entry[name] for entry in logged] for name in names}
    found["evaluated"] = [trainer.evaluate()["eval_loss"]]
    found["weights"], found["initial"] = weights(trainer.model), weights(make())
    torch.save(found, folder / f"{kind} {rank} of {ranks}.pt")


if __name__ == "__main__":
    start(main)
