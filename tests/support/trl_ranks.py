"""Train with TRL on two ranks that share sequences, and on one device: tests/integration/test_trl.py.

python -m tests.support.trl_ranks FOLDER [CASE]...

The third process is one device. Each writes the logged numbers and the trainable weights of each case.
"""

from __future__ import annotations

import copy
import os
import sys
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import torch.distributed as dist
import trl
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerFast

from burst_portable.errors import InputError, UnsupportedError
from burst_portable.integrations.accelerate import SequenceParallelism
from burst_portable.integrations.trl import SequenceDPOTrainer, SequenceSFTTrainer
from tests.support.forked import run_forked
from tests.support.models import make
from tests.support.trainer_cases import LENGTHS, LORA, forget_accelerator, weights

RANKS = 2
CASES: dict[str, dict[str, Any]] = {
    "packed sft": {"packing": True, "max_length": 45},
    "dpo of adapters": {"kind": "lora", "gradient_accumulation_steps": 2},
    "sft": {"gradient_accumulation_steps": 2},
    "sft of adapters": {"kind": "lora"},
    "checkpointed sft": {"activation_checkpointing": True},
    "dft": {"loss_type": "dft"},
    "dpo": {"gradient_accumulation_steps": 2},
    "ipo with weights": {"loss_type": "ipo", "use_weighting": True},
}


def tokenizer() -> PreTrainedTokenizerFast:
    words = {f"w{i}": i for i in range(61)} | {"<pad>": 61, "<eos>": 62, "<unk>": 63}
    made = Tokenizer(WordLevel(words, unk_token="<unk>"))
    made.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


def completions() -> Dataset:
    """Return ragged rows, of which the last five to ten tokens are the completion."""
    generator = torch.Generator().manual_seed(3)
    ids = [torch.randint(0, 61, (n,), generator=generator).tolist() for n in LENGTHS[:7]]
    masks = [[0] * (len(row) - 5 - i) + [1] * (5 + i) for i, row in enumerate(ids)]
    return Dataset.from_list([{"input_ids": x, "completion_mask": m} for x, m in zip(ids, masks, strict=True)])


def pairs() -> Dataset:
    """Return prompts with a chosen and a rejected completion of different lengths."""

    def text(start: int, count: int) -> str:
        return " ".join(f"w{(start + 7 * i) % 61}" for i in range(count))

    sizes = [(n, 5 + n // 4, 9 - n // 5) for n in LENGTHS[:7]]
    rows = [{"prompt": text(n, n), "chosen": " " + text(3, a), "rejected": " " + text(20, b)} for n, a, b in sizes]
    return Dataset.from_list(rows)


def train(folder: Path, name: str, parallelism: SequenceParallelism | None) -> dict[str, Any]:
    """Return what TRL logs in two steps and an evaluation, and the weights."""
    forget_accelerator()
    torch.manual_seed(0)
    options = dict(CASES[name])
    is_adapted, is_dpo = options.pop("kind", "") == "lora", "sft" not in name and name != "dft"
    usual: dict[str, Any] = {
        "output_dir": str(folder),
        "parallelism_config": parallelism,
        "use_cpu": True,
        "bf16": False,
        "max_steps": 2,
        "per_device_train_batch_size": 2,
        "per_device_eval_batch_size": 2,
        "optim": "sgd",
        "learning_rate": 0.5,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "activation_checkpointing": False,
        "ddp_find_unused_parameters": False,
    }
    model = make("llama", torch.float32)
    data = {"train_dataset": pairs(), "eval_dataset": pairs()} if is_dpo else {}
    data = data or {"train_dataset": completions(), "eval_dataset": completions()}
    data |= {"processing_class": tokenizer(), "peft_config": peft.LoraConfig(**LORA) if is_adapted else None}
    if is_dpo:
        data |= {} if is_adapted else {"ref_model": copy.deepcopy(model)}
        args = trl.DPOConfig(**usual | options)
        trainer = (trl.DPOTrainer if parallelism is None else SequenceDPOTrainer)(model, args=args, **data)
    else:
        args = trl.SFTConfig(**usual | options)
        trainer = (trl.SFTTrainer if parallelism is None else SequenceSFTTrainer)(model, args=args, **data)
    trainer.train()
    trainer.evaluate()
    entries = [entry for entry in trainer.state.log_history if "train_runtime" not in entry]
    logged = [{k: x for k, x in e.items() if "runtime" not in k and "per_second" not in k} for e in entries]
    return {"logged": logged, "weights": weights(trainer.model)}


def check_errors(folder: Path, rank: int) -> None:
    """Check that no trainer of TRL trains on several ranks with another loss than on one device."""
    forget_accelerator()
    shared = {"output_dir": str(folder), "use_cpu": True, "bf16": False, "report_to": "none"}
    shared |= {"parallelism_config": SequenceParallelism()}
    model, data = make("llama", torch.float32), {"processing_class": tokenizer()}
    if rank < RANKS:
        with pytest.raises(InputError, match=r"use SequenceTrainer .*or one of integrations\.trl"):
            trl.SFTTrainer(model, args=trl.SFTConfig(**shared), train_dataset=completions(), **data)
    args = trl.DPOConfig(**shared, precompute_ref_log_probs=True)
    with pytest.raises(UnsupportedError, match="precompute_ref_log_probs"):
        SequenceDPOTrainer(model, args=args, train_dataset=pairs(), **data)


def main(rank: int, folder: Path, names: list[str]) -> None:
    torch.set_num_threads(1)
    if rank < RANKS:
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        os.environ |= {"WORLD_SIZE": str(RANKS), "LOCAL_WORLD_SIZE": str(RANKS)}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}  # required but unused: the store is a file
        store = dist.FileStore(str(folder / "store"), RANKS)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
    check_errors(folder, rank)
    for name in names:
        parallelism = SequenceParallelism() if rank < RANKS else None
        torch.save(train(folder / f"{name} {rank}", name, parallelism), folder / f"{name} {rank}.pt")
    if rank < RANKS:
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    run_forked(RANKS + 1, main, Path(sys.argv[1]), sys.argv[2:] or list(CASES))
