"""Train with TRL on ranks that share sequences, and on fewer devices: tests/integration/test_trl.py.

python -m tests.support.trl_ranks FOLDER SEQUENCES CASE...

Two ranks share each of the concurrent sequences. The last processes, one per sequence, train without this library:
for one sequence on one device, for more under DDP. Each writes the logged numbers and the trainable weights.
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
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, set_seed

from burst_portable.errors import InputError, UnsupportedError
from burst_portable.integrations.accelerate import SequenceParallelism
from burst_portable.integrations.trl import SequenceDPOTrainer, SequenceGRPOTrainer, SequenceSFTTrainer
from tests.support.forked import run_forked
from tests.support.models import make
from tests.support.trainer_cases import LENGTHS, LORA, forget_accelerator, weights

SHARING = 2
CASES: dict[str, dict[str, Any]] = {
    "packed sft": {"packing": True, "max_length": 45},
    "dpo of adapters": {"kind": "lora", "gradient_accumulation_steps": 2},
    "sft": {"gradient_accumulation_steps": 2},
    "sft of adapters": {"kind": "lora"},
    "checkpointed sft": {"activation_checkpointing": True},
    "dft": {"loss_type": "dft"},
    "dpo": {"gradient_accumulation_steps": 2},
    "ipo with weights": {"loss_type": "ipo", "use_weighting": True},
    "grpo": {"gradient_accumulation_steps": 2, "loss_type": "grpo", "beta": 0.1},
    "sft of experts": {"kind": "mixtral", "gradient_accumulation_steps": 2},
    "packed sft of experts": {"kind": "mixtral", "packing": True, "max_length": 45},
    "dpo of experts": {"kind": "mixtral"},
    "grpo of experts": {"kind": "mixtral", "loss_type": "grpo"},
    "grpo of adapters": {"kind": "lora", "steps_per_generation": 2, "beta": 0.1},
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


def reward(completion_ids: list[list[int]], **others: Any) -> list[float]:
    return [float(sum(ids) % 7) for ids in completion_ids]


def make_trainer(folder: Path, name: str, parallelism: SequenceParallelism | None) -> Any:
    """Return a trainer of two steps: TRL's own without `parallelism`."""
    options, data = dict(CASES[name]), {"processing_class": tokenizer()}
    is_adapted, is_alone = options.pop("kind", "") == "lora", parallelism is None
    if "experts" in name:
        options["router_aux_loss_coef"] = 0.5
    if is_adapted:
        data["peft_config"] = peft.LoraConfig(**LORA)
    model = AutoModelForCausalLM.from_pretrained(f"{folder} model")
    arguments: dict[str, Any] = {
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
        **options,
    }
    if "dpo" in name or "ipo" in name:
        data |= {"train_dataset": pairs(), "eval_dataset": pairs()}
        data |= {} if is_adapted else {"ref_model": copy.deepcopy(model)}
        return (trl.DPOTrainer if is_alone else SequenceDPOTrainer)(model, args=trl.DPOConfig(**arguments), **data)
    if "grpo" in name:
        prompts = pairs().select_columns("prompt")
        data |= {"train_dataset": prompts, "eval_dataset": prompts, "reward_funcs": reward}
        args = trl.GRPOConfig(**arguments, num_generations=2, max_completion_length=9)
        return (trl.GRPOTrainer if is_alone else SequenceGRPOTrainer)(model, args=args, **data)
    data |= {"train_dataset": completions(), "eval_dataset": completions()}
    return (trl.SFTTrainer if is_alone else SequenceSFTTrainer)(model, args=trl.SFTConfig(**arguments), **data)


def train(folder: Path, name: str, parallelism: SequenceParallelism | None) -> dict[str, Any]:
    """Return what TRL logs in two steps and an evaluation, and the weights."""
    forget_accelerator()
    torch.manual_seed(0)
    trainer = make_trainer(folder, name, parallelism)
    set_seed(5)  # completions are sampled
    trainer.train()
    trainer.evaluate()
    entries = [entry for entry in trainer.state.log_history if "train_runtime" not in entry]
    timed = ("runtime", "per_second", "step_time")
    logged = [{k: x for k, x in e.items() if not any(word in k for word in timed)} for e in entries]
    return {"logged": logged, "weights": weights(trainer.model)}


def check_errors(folder: Path) -> None:
    """Check that no trainer of TRL trains on several ranks with another loss than on one device."""
    model, data = make("llama", torch.float32), {"processing_class": tokenizer()}

    def arguments(config: Any, **options: Any) -> Any:
        forget_accelerator()
        usual = {"output_dir": str(folder), "use_cpu": True, "bf16": False, "report_to": "none"}
        usual |= {"per_device_train_batch_size": 2, "per_device_eval_batch_size": 2}
        return config(**usual, parallelism_config=SequenceParallelism(), **options)

    with pytest.raises(InputError, match=r"use SequenceTrainer .*or one of burst_portable\.integrations\.trl"):
        trl.SFTTrainer(model, args=arguments(trl.SFTConfig), train_dataset=completions(), **data)
    args = arguments(trl.DPOConfig, precompute_ref_log_probs=True)
    with pytest.raises(UnsupportedError, match="precompute_ref_log_probs"):
        SequenceDPOTrainer(model, args=args, train_dataset=pairs(), **data)
    data |= {"reward_funcs": reward, "train_dataset": pairs().select_columns("prompt")}
    with pytest.raises(InputError, match="multiple of num_generations=4; got 2"):
        SequenceGRPOTrainer(model, args=arguments(trl.GRPOConfig, num_generations=4), **data)
    with pytest.raises(UnsupportedError, match="got scale_rewards='batch'"):
        SequenceGRPOTrainer(model, args=arguments(trl.GRPOConfig, num_generations=2, scale_rewards="batch"), **data)


def main(rank: int, folder: Path, sequences: int, names: list[str]) -> None:
    torch.set_num_threads(1)
    for name in names:  # GRPO loads its reference model; a rank other than 0 saves nothing
        kind = "mixtral" if "experts" in name else "llama"
        make(kind, torch.float32).save_pretrained(folder / f"{name} {rank} model")
    shares = rank < SHARING * sequences
    size, local = (SHARING * sequences, rank) if shares else (sequences, rank - SHARING * sequences)
    if size > 1:
        os.environ |= {"RANK": str(local), "LOCAL_RANK": str(local)}
        os.environ |= {"WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size)}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}  # required but unused: the store is a file
        store = dist.FileStore(str(folder / f"store {shares}"), size)
        dist.init_process_group("gloo", store=store, rank=local, world_size=size)
    if shares:
        check_errors(folder)
    for name in names:
        parallelism = SequenceParallelism(SHARING) if shares else None
        torch.save(train(folder / f"{name} {rank}", name, parallelism), folder / f"{name} {rank}.pt")
    if size > 1:
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    count = int(sys.argv[2])
    run_forked((SHARING + 1) * count, main, Path(sys.argv[1]), count, sys.argv[3:])
