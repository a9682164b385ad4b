"""Train a small model with FSDP2 on a grid of data ranks and sequence ranks.

torchrun --nproc-per-node 1 examples/train_with_fsdp.py
torchrun --nproc-per-node 4 examples/train_with_fsdp.py --sequence 2      (2 sequences at a time, 2 ranks each)
torchrun --nproc-per-node 4 examples/train_with_fsdp.py --sequence 4 --compile inductor

It uses activation checkpointing, gradient accumulation and clipping, and optionally torch.compile. Halfway, a new model
continues from a checkpoint. Any grid of ranks gives the same losses. This example was run on CPUs.
"""

import argparse
import os
import pydoc_data.topics
import tempfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

import burst_portable as bp
from burst_portable.nn import SelfAttention

STEPS, BATCH, LENGTH, DIM = 4, 4, 509, 64  # BATCH sequences of LENGTH tokens per step


class Block(nn.Module):
    def __init__(self, mesh: bp.Mesh) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.RMSNorm(DIM), nn.RMSNorm(DIM)])
        self.attention = SelfAttention(DIM, heads=4, kv_heads=2, mesh=mesh)
        self.mlp = nn.Sequential(nn.Linear(DIM, 4 * DIM, bias=False), nn.GELU(), nn.Linear(4 * DIM, DIM, bias=False))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norms[0](x), seq_len=LENGTH)
        return x + self.mlp(self.norms[1](x))


def make(grid: DeviceMesh, mesh: bp.Mesh, compiled: str | None) -> tuple[FSDPModule, torch.optim.Optimizer]:
    """Return a model that FSDP2 shards over all ranks, so that it averages their gradients, and its optimizer."""
    blocks = [checkpoint_wrapper(Block(mesh)) for _ in range(2)]
    model = nn.Sequential(nn.Embedding(256, DIM), *blocks, nn.Linear(DIM, 256, bias=False)).to(grid.device_type)
    everyone = grid._flatten("everyone")
    for block in blocks:
        if compiled:
            block.compile(backend=compiled)
        fully_shard(block, mesh=everyone)
    sharded = fully_shard(model, mesh=everyone)
    return sharded, torch.optim.AdamW(model.parameters(), lr=3e-3)


def step(model: FSDPModule, optimizer: torch.optim.Optimizer, rows: torch.Tensor, grid: DeviceMesh, mesh: bp.Mesh):
    """Train one step. Return its loss, the mean over all labels of BATCH rows."""
    data, mine = grid["data"].size(), grid["data"].get_local_rank()
    labels = BATCH * (LENGTH - 1)
    total = torch.zeros((), device=grid.device_type)
    optimizer.zero_grad()
    for first in range(0, BATCH, data):  # one row per data rank at a time
        model.set_requires_gradient_sync(first + data == BATCH)
        batch = bp.shard_batch(rows[first + mine].unsqueeze(0), mesh=mesh)
        logits = model(batch["input_ids"]).flatten(0, 1)
        loss = nn.functional.cross_entropy(logits, batch["labels"].flatten(), reduction="sum") / labels
        (loss * dist.get_world_size()).backward()  # FSDP divides by all ranks, those of a sequence too
        total += loss.detach()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    dist.all_reduce(total)
    return total.item()


def train(sequence: int, compiled: str | None, folder: str) -> list[float]:
    """Return the loss of each step. Halfway, replace the model by a new one that loads a checkpoint."""
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else torch.device("cpu")
    shape = (dist.get_world_size() // sequence, sequence)
    grid = init_device_mesh(device.type, shape, mesh_dim_names=("data", "sequence"))
    mesh = bp.Mesh.from_device_mesh(grid, "sequence")
    text = "\n".join(pydoc_data.topics.topics.values()).encode()[: STEPS * BATCH * LENGTH]
    rows = torch.tensor(list(text), device=device.type).view(STEPS, BATCH, LENGTH)
    torch.manual_seed(0)  # equal weights on every rank before FSDP shards them
    model, optimizer = make(grid, mesh, compiled)
    losses = []
    for number, batch in enumerate(rows):
        if number == STEPS // 2:
            saved = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
            dcp.save(saved, checkpoint_id=folder)
            model, optimizer = make(grid, mesh, compiled)  # with other weights
            saved = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
            dcp.load(saved, checkpoint_id=folder)
            set_state_dict(model, optimizer, model_state_dict=saved["model"], optim_state_dict=saved["optimizer"])
        losses.append(step(model, optimizer, batch, grid, mesh))
    return losses


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sequence", type=int, default=1, help="number of ranks that share a sequence")
    parser.add_argument("--compile", help="backend of torch.compile; default: no compilation")
    options = parser.parse_args()
    if "RANK" not in os.environ:
        parser.exit(2, f"{parser.prog}: start it with torchrun\n")
    world = int(os.environ["WORLD_SIZE"])
    if options.sequence < 1 or world % options.sequence or BATCH % (world // options.sequence):
        told = f"{world} ranks; expected a multiple of --sequence {options.sequence}, data ranks that divide {BATCH}"
        parser.exit(2, f"{parser.prog}: {told}\n")
    dist.init_process_group()
    if torch.accelerator.is_available():
        torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
    with tempfile.TemporaryDirectory() as folder:
        folders = [folder]
        dist.broadcast_object_list(folders)  # that of rank 0
        losses = train(options.sequence, options.compile, folders[0])
    if dist.get_rank() == 0:
        print("losses:", *(f"{loss:.6f}" for loss in losses))
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
