"""Count the bytes of live tensors, operation by operation."""

from __future__ import annotations

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import burst_portable as bp
from burst_portable.strategies.base import Strategy

LENGTH, HEADS, KV_HEADS, DIM = 1024, 4, 2, 32
Q_BYTES = LENGTH * HEADS * DIM * 4
KV_BYTES = 2 * LENGTH * KV_HEADS * DIM * 4
RESULT_BYTES = 2 * Q_BYTES + KV_BYTES  # out and gradients


class LiveMemory(TorchDispatchMode):
    """Count the bytes of live storages that operations of this thread made, and the largest of them.

    Views and in-place writes make no new storage. A transfer may write into the buffer of the other rank, which depends
    on timing.
    """

    def __init__(self) -> None:
        super().__init__()
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = self.largest = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        old = {x.untyped_storage()._cdata for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)}
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and (storage := leaf.untyped_storage())._cdata not in old:
                self._alive[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
                self.largest = max(self.largest, storage.nbytes())
        self._alive = {key: held for key, held in self._alive.items() if not held[0].expired()}
        self.peak = max(self.peak, sum(size for _, size in self._alive.values()))
        return result


def measured(ranks: int, strategy: str | Strategy, kv_heads: int = KV_HEADS) -> list[LiveMemory]:
    """Return the live memory of each rank in a forward and a backward pass. The inputs are not counted."""
    whole = [torch.randn(1, LENGTH, heads, DIM) for heads in (HEADS, kv_heads, kv_heads, HEADS)]

    def work(mesh):
        q, k, v, dout = (bp.shard(x, mesh) for x in whole)
        q, k, v = (x.requires_grad_() for x in (q, k, v))
        with LiveMemory() as memory:
            bp.attention(q, k, v, mesh=mesh, strategy=strategy).backward(dout)
        return memory

    return bp.run_threads(ranks, work)
