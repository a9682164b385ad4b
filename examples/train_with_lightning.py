"""Train a small Llama with Lightning, each sequence sharded over all ranks.

Any number of ranks gives the same losses. Lightning starts the ranks, or torchrun does.

python examples/train_with_lightning.py
python examples/train_with_lightning.py --devices 2
torchrun --nproc-per-node 2 examples/train_with_lightning.py --devices 2
"""

import argparse
import logging
import pydoc_data.topics

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

from burst_portable.integrations.lightning import SequenceStrategy

SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}


class Llama(pl.LightningModule):
    """A module as for one device. This library is not mentioned in it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model = LlamaForCausalLM(LlamaConfig(vocab_size=256, num_hidden_layers=2, **SIZES))
        self.losses: list[float] = []

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        loss = self.model(input_ids=batch, labels=batch).loss
        self.log("loss", loss)
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch: Tensor, index: int) -> None:
        self.log("val_loss", self.model(input_ids=batch, labels=batch).loss, sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


def texts(count: int, length: int) -> list[Tensor]:
    """Return texts as bytes, each a row of `length` tokens."""
    found = [text.encode() for text in sorted(pydoc_data.topics.topics.values()) if len(text.encode()) >= length]
    return [torch.tensor(list(text[:length])) for text in found[:count]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, default=1, help="number of ranks of this node. Default: 1")
    parser.add_argument("--accelerator", default="cpu", help='"gpu" for GPUs. Default: cpu')
    options = parser.parse_args()
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    trainer = pl.Trainer(
        accelerator=options.accelerator,
        devices=options.devices,
        strategy=SequenceStrategy(),  # all ranks share each sequence; cp_size=4: groups of 4
        max_steps=3,
        accumulate_grad_batches=2,
        gradient_clip_val=1.0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    model = Llama()
    held_out = texts(14, 301)[12:]
    trainer.fit(model, DataLoader(texts(12, 301), batch_size=2), DataLoader(held_out, batch_size=2))
    if trainer.is_global_zero:
        print("losses:", *(f"{loss:.6f}" for loss in [*model.losses, trainer.callback_metrics["val_loss"]]))


if __name__ == "__main__":
    main()
