"""Train a causal language model with Transformers' Trainer, each sequence sharded over several ranks.

python SCRIPT.py
torchrun --nproc-per-node 2 SCRIPT.py
torchrun --nproc-per-node 8 SCRIPT.py --model FOLDER --text BOOK.txt --seq-len 131072 --cp-size 8

Without options, a small Llama with random weights learns bytes of an English text.
"""

import argparse
import pydoc_data.topics
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    TrainingArguments,
    default_data_collator,
    set_seed,
)

from burst_portable.integrations.accelerate import SequenceParallelism
from burst_portable.integrations.trainer import SequenceTrainer

SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}


def read_rows(name: str | None, text: Path | None, seq_len: int) -> list[Tensor]:
    """Return a text as rows of `seq_len` tokens: those of the model's tokenizer, or bytes."""
    content = text.read_text(encoding="utf-8") if text else "\n".join(pydoc_data.topics.topics.values())
    if name is None:
        tokens = torch.tensor(list(content.encode()))
    else:
        tokens = AutoTokenizer.from_pretrained(name)(content, return_tensors="pt")["input_ids"][0]
    rows = list(tokens[: len(tokens) // seq_len * seq_len].split(seq_len))
    if not rows:
        raise SystemExit(f"the text has {len(tokens)} tokens, fewer than --seq-len {seq_len}")
    return rows


def load(name: str | None) -> PreTrainedModel:
    """Return the model of a checkpoint in float32; without a name, a small Llama with random weights."""
    set_seed(0)
    if name is None:
        return LlamaForCausalLM(LlamaConfig(vocab_size=256, num_hidden_layers=2, **SIZES))
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32)
    return model


def tokens(text: str) -> int:
    """Return a number of tokens: an integer, or digits with k (times 1,024) or m (times 1,048,576) after them."""
    factor = {"k": 1 << 10, "m": 1 << 20}.get(text[-1:].lower())
    return int(text) if factor is None else int(text[:-1]) * factor


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="folder or Hub ID of a model; default: a small Llama with random weights")
    parser.add_argument("--text", type=Path, help="text file; default: English that comes with Python")
    parser.add_argument("--seq-len", type=tokens, default=512, help="tokens of a sequence, as 512 or 128k")
    parser.add_argument("--steps", type=int, default=10, help="number of optimizer steps")
    parser.add_argument("--batch", type=int, default=1, help="sequences per step and group of ranks")
    parser.add_argument("--cp-size", type=int, help="ranks that share a sequence; default: all")
    parser.add_argument("--save", default="trained_with_trainer", metavar="FOLDER", help="where to write the model")
    options = parser.parse_args()

    has_device = torch.accelerator.is_available()
    arguments = TrainingArguments(
        output_dir=options.save,
        parallelism_config=SequenceParallelism(options.cp_size),  # the one argument
        max_steps=options.steps,
        per_device_train_batch_size=options.batch,
        gradient_checkpointing=True,
        learning_rate=1e-5 if options.model else 3e-3,
        lr_scheduler_type="constant",
        bf16=has_device,
        use_cpu=not has_device,
        ddp_find_unused_parameters=False,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
    )
    trainer = SequenceTrainer(
        model=load(options.model),
        args=arguments,
        data_collator=default_data_collator,
        train_dataset=[{"input_ids": r, "labels": r} for r in read_rows(options.model, options.text, options.seq_len)],
    )
    trainer.train()
    trainer.save_model()
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
