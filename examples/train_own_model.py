"""Train a small model with the sequence sharded over ranks. Any number of ranks gives the same losses.

python examples/train_own_model.py --ranks 2        (ranks are threads)
torchrun --nproc-per-node 2 examples/train_own_model.py
"""

import argparse
import os
import pydoc_data.topics

import torch
import torch.distributed as dist
from torch import nn

import burst_portable as bp
from burst_portable.errors import InputError
from burst_portable.nn import SelfAttention


class Block(nn.Module):
    def __init__(self, dim: int, mesh: bp.Mesh) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.RMSNorm(dim), nn.RMSNorm(dim)])
        self.attention = SelfAttention(dim, heads=4, kv_heads=2, mesh=mesh)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim, bias=False), nn.GELU(), nn.Linear(4 * dim, dim, bias=False))

    def forward(self, x: torch.Tensor, seq_len: int) -> torch.Tensor:
        x = x + self.attention(self.norms[0](x), seq_len=seq_len)
        return x + self.mlp(self.norms[1](x))


def train(mesh: bp.Mesh, *, steps: int = 5, seq_len: int = 509, dim: int = 64) -> list[float]:
    """Return the loss of each step, which is the same on every mesh."""
    text = torch.tensor(list("\n".join(pydoc_data.topics.topics.values()).encode()[: steps * seq_len]))
    # Raises before the model is made if there are more ranks than tokens.
    batches = [bp.shard_batch(row, mesh=mesh) for row in text.view(steps, 1, seq_len)]
    generator = torch.Generator().manual_seed(0)
    parts = nn.ModuleDict({"embed": nn.Embedding(256, dim), "head": nn.Linear(dim, 256, bias=False)})
    parts["blocks"] = nn.ModuleList(Block(dim, mesh) for _ in range(2))
    for parameter in parts.parameters():  # equal on every rank
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=0.02, generator=generator)
    optimizer = torch.optim.AdamW(parts.parameters(), lr=3e-3)
    losses = []
    for batch in batches:
        x = parts["embed"](batch["input_ids"])
        for block in parts["blocks"]:
            x = block(x, seq_len)
        logits = parts["head"](x).flatten(0, 1)
        # This rank's part of the mean over all tokens: the sum over ranks is the loss of one device.
        loss = nn.functional.cross_entropy(logits, batch["labels"].flatten(), reduction="sum") / (seq_len - 1)
        optimizer.zero_grad()
        loss.backward()
        bp.all_reduce_gradients(parts.parameters(), mesh)
        optimizer.step()
        losses.append(bp.all_reduce(loss.detach(), mesh).item())
    return losses


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2, help="number of threads; ignored under torchrun")
    ranks = parser.parse_args().ranks
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
        losses, first = train(bp.Mesh.from_group()), dist.get_rank() == 0
        dist.destroy_process_group()
    else:
        try:
            losses, first = bp.run_threads(ranks, train)[0], True
        except InputError as error:  # such as --ranks 0
            parser.exit(2, f"{parser.prog}: {error}\n")
    if first:  # all ranks have equal losses
        print("losses:", *(f"{loss:.6f}" for loss in losses))
