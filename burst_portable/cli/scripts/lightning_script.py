"""Train a causal language model with Lightning, each sequence sharded over several ranks.

python SCRIPT.py
python SCRIPT.py --devices 2
python SCRIPT.py --devices 8 --model FOLDER --text BOOK.txt --seq-len 131072 --cp-size 8

Without options, a small Llama with random weights learns bytes of an English text.
"""

import argparse
import pydoc_data.topics
from pathlib import Path

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    set_seed,
)

from burst_portable.integrations.lightning import SequenceStrategy

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


class CausalLM(pl.LightningModule):
    """A language model as for one device."""

    def __init__(self, name: str | None) -> None:
        super().__init__()
        self.model, self.learning_rate = load(name), 1e-5 if name else 3e-3
        self.model.gradient_checkpointing_enable()

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        loss: Tensor = self.model(input_ids=batch, labels=batch).loss
        self.log("loss", loss, sync_dist=True)
        self.print(f"step {self.global_step}: loss {loss.item():.6f}")
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.learning_rate)


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
    parser.add_argument("--devices", type=int, help="ranks of this node; default: all devices")
    parser.add_argument("--save", default="trained_with_lightning", metavar="FOLDER", help="where to write the model")
    options = parser.parse_args()

    has_device = torch.accelerator.is_available()
    trainer = pl.Trainer(
        accelerator="auto" if has_device else "cpu",
        devices=options.devices or max(torch.accelerator.device_count(), 1),
        strategy=SequenceStrategy(options.cp_size),  # the one argument
        precision="bf16-mixed" if has_device else "32-true",
        max_steps=options.steps,
        gradient_clip_val=1.0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module = CausalLM(options.model)
    trainer.fit(module, DataLoader(read_rows(options.model, options.text, options.seq_len), options.batch))
    if trainer.is_global_zero:
        module.model.save_pretrained(options.save)


if __name__ == "__main__":
    main()
