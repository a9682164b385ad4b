"""Train a sharded model on full batches under DDP and FSDP2 on two ranks, and write results of rank 0 as JSON.

For each: the norm of the gradients with `averaged_gradients`, the text of the error without, and, with the check
replaced, the norm that such a call would train with. For FSDP2 with a divisor of 1, the norm without the argument.

Then, by wrapping and way to scale the loss of a shard in `LOSSES`: the norms of two steps, and the text of an error.
Last, results of `sums`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from burst_portable import Mesh, all_reduce_gradients
from burst_portable.config import Config
from burst_portable.errors import InputError
from burst_portable.integrations.transformers import model_calls, parallelize
from tests.support.forked import run_forked
from tests.support.models import make, tokens

RANKS = 2
LOSSES = ("factor", "none", "count", "accumulated")
"""The loss is multiplied by the ranks; or not; or its count is divided; or two batches have half of that factor."""


def steps(model: Any, wrap: Callable[[Any], Any], way: str) -> list[Any]:
    """Return the norms of the gradients of two steps, or of one and the text of the error."""
    ids, found = tokens(1, 32), list[Any]()
    sharded = parallelize(model, Mesh.from_group(config=Config(timeout=60)))
    wrapped: Any = wrap(model)
    try:
        for _ in range(2):
            for _ in range(2 if way == "accumulated" else 1):
                inputs = sharded.shard(ids)
                if way == "count":
                    inputs["num_items_in_batch"] = inputs["num_items_in_batch"] / RANKS
                factor = RANKS if way == "factor" else 1
                (wrapped(**inputs).loss * factor).backward()
            found.append(norm_of(model))
            model.zero_grad()
    except InputError as error:
        found.append(str(error))
    return found


def sums(model: Any) -> list[Any]:
    """Return norms of gradients that `all_reduce_gradients` summed without DDP, and the text of the error after DDP.

    The last number is the norm that such a call would train with.
    """
    mesh, ids = Mesh.from_group(config=Config(timeout=60)), tokens(1, 32)
    sharded = parallelize(model, mesh)
    wrapped, found = DistributedDataParallel(model), list[Any]()
    for _ in range(2):
        with wrapped.no_sync():
            wrapped(**sharded.shard(ids)).loss.backward()
        all_reduce_gradients(model.parameters(), mesh)
        found.append(norm_of(model))
        model.zero_grad()
        (wrapped(**sharded.shard(ids)).loss * RANKS).backward()
        try:
            all_reduce_gradients(model.parameters(), mesh)
        except InputError as error:
            found.append(str(error))
        found.append(norm_of(model))
        sharded.mesh.gradient_records.averaged_by_ddp.clear()
        all_reduce_gradients(model.parameters(), mesh)
        found.append(norm_of(model))
        model.zero_grad()
    return found


def norm_of(model: Any) -> float:
    """Return the norm of the gradients."""
    gradients = [p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad for p in model.parameters()]
    return torch.cat([gradient.flatten() for gradient in gradients]).norm().item()


def train(rank: int, folder: str) -> None:
    """Write the results of rank 0."""
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
    ids = tokens(1, 32)

    def norm(wrap: Callable[[Any], Any], *, averaged: bool) -> float:
        model = make("llama")
        parallelize(model, Mesh.from_group(config=Config(timeout=60)), full_batches=True, averaged_gradients=averaged)
        wrapped: Any = wrap(model)
        with torch.no_grad():
            wrapped(input_ids=ids, labels=ids)  # an evaluation has no gradients
        wrapped(input_ids=ids, labels=ids).loss.backward()
        return norm_of(model)

    def summing(model: Any) -> Any:
        fully_shard(model).set_gradient_divide_factor(1.0)
        model.set_force_sum_reduction_for_comms(True)  # gloo has no other
        return model

    ways: tuple[Callable[[Any], Any], ...] = (DistributedDataParallel, fully_shard)
    found: list[Any] = [norm(wrap, averaged=True) for wrap in ways]
    for wrap in ways:
        try:
            norm(wrap, averaged=False)
        except InputError as error:
            found.append(str(error))
    found.append(norm(summing, averaged=False))
    model_calls.check_averaging = lambda model, mesh, *, averaged: None
    found += [norm(wrap, averaged=False) for wrap in ways]
    found.append({f"{wrap.__name__} {way}": steps(make("llama"), wrap, way) for wrap in ways for way in LOSSES})
    found += sums(make("llama"))
    if rank == 0:
        Path(folder, "found.json").write_text(json.dumps(found), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    run_forked(RANKS, train, sys.argv[1])
