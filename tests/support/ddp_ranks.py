"""Train a sharded model on full batches under DDP on two ranks, and write results of rank 0 as JSON to a folder.

The norm of the gradients with `averaged_gradients`, the text of the error without, and, with the check replaced, the
norm that such a call would train with.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from burst_portable import Mesh
from burst_portable.config import Config
from burst_portable.errors import InputError
from burst_portable.integrations.transformers import parallel, parallelize
from tests.support.forked import run_forked
from tests.support.models import make, tokens

RANKS = 2


def train(rank: int, folder: str) -> None:
    """Write the results of rank 0."""
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
    ids = tokens(1, 32)

    def norm(*, averaged: bool) -> float:
        model = make("llama")
        parallelize(model, Mesh.from_group(config=Config(timeout=60)), full_batches=True, averaged_gradients=averaged)
        wrapped: Any = DistributedDataParallel(model)
        with torch.no_grad():
            wrapped(input_ids=ids, labels=ids)  # an evaluation has no gradients
        wrapped(input_ids=ids, labels=ids).loss.backward()
        return torch.cat([p.grad.flatten() for p in model.parameters()]).norm().item()

    found: list[Any] = [norm(averaged=True)]
    try:
        norm(averaged=False)
    except InputError as error:
        found.append(str(error))
    parallel.check_averaging = lambda mesh, *, averaged: None
    found.append(norm(averaged=False))
    if rank == 0:
        Path(folder, "found.json").write_text(json.dumps(found), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    run_forked(RANKS, train, sys.argv[1])
