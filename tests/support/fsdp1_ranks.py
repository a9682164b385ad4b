"""Train a sharded model under torch's first FSDP on two ranks, and print the losses of rank 0 as JSON."""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from burst_portable import Mesh, all_reduce
from burst_portable.config import Config
from burst_portable.integrations.transformers import parallelize
from tests.support.models import make, tokens

RANKS = 2


def train(rank: int, folder: str, use_orig_params: bool) -> None:
    """Run three steps of one rank. Each layer is a unit, so that its parameters are shards when the model is called."""
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
    mesh, model, ids = Mesh.from_group(config=Config(timeout=60)), make("llama").float(), tokens(1, 32)
    sharded = parallelize(model, mesh)
    policy = ModuleWrapPolicy({type(model.model.layers[0])})
    wrapped = FullyShardedDataParallel(
        model, use_orig_params=use_orig_params, device_id=torch.device("cpu"), auto_wrap_policy=policy
    )
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    losses = []
    for _ in range(3):
        loss = wrapped(**sharded.shard(ids)).loss
        (loss * RANKS).backward()  # FSDP averages
        optimizer.step()
        optimizer.zero_grad()
        losses.append(all_reduce(loss.detach(), mesh).item())
    if rank == 0:
        Path(folder, "losses.json").write_text(json.dumps(losses))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(train, (folder, sys.argv[1] == "original"), nprocs=RANKS)
        print(Path(folder, "losses.json").read_text())
