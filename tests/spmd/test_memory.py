"""No rank holds more than its own shard and the blocks in flight: live tensor memory, counted op by op."""

from __future__ import annotations

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import burst_portable as bp

LENGTH, HEADS, KV_HEADS, DIM = 1024, 4, 2, 32
Q_BYTES = LENGTH * HEADS * DIM * 4
KV_BYTES = 2 * LENGTH * KV_HEADS * DIM * 4
RESULT_BYTES = 2 * Q_BYTES + KV_BYTES  # out and gradients


class LiveMemory(TorchDispatchMode):
    """Bytes of storages that this thread's operations made and that are still alive; and the largest of them.

    A view, or what is written in place, is no new storage: a transfer copies into the other rank's buffer where this
    rank comes second, and whether it does is chance.
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


def measured(ranks: int, strategy: str) -> list[LiveMemory]:
    """Forward and backward on every rank; inputs are made before counting starts."""
    whole = [torch.randn(1, LENGTH, heads, DIM) for heads in (HEADS, KV_HEADS, KV_HEADS, HEADS)]

    def work(mesh):
        q, k, v, dout = (bp.shard(x, mesh) for x in whole)
        q, k, v = (x.requires_grad_() for x in (q, k, v))
        with LiveMemory() as memory:
            bp.attention(q, k, v, mesh=mesh, strategy=strategy).backward(dout)
        return memory

    return bp.run_local(ranks, work)


@pytest.mark.parametrize("strategy", ["ring", "burst", "double_ring"])
def test_memory_falls_with_the_ranks(strategy):
    peaks = {ranks: max(m.peak for m in measured(ranks, strategy)) for ranks in (1, 2, 4, 8)}
    # One rank has its results alone; two merge and add theirs in wider numbers (float64 out, of float32 tensors), and
    # hold blocks besides. From two to four a second block is in flight (a third for the outer ring); from there on all
    # is in proportion to the shard.
    assert peaks[1] < 1.1 * RESULT_BYTES
    assert peaks[2] < (1.5 if strategy == "ring" else 1.82) * RESULT_BYTES
    assert peaks[4] < 0.85 * peaks[2]
    assert peaks[8] < 0.8 * peaks[4]


@pytest.mark.parametrize("strategy", ["ring", "burst", "double_ring"])
def test_nothing_is_as_large_as_the_whole(strategy):
    """On 8 ranks: no tensor of S x S, none of a whole sequence's keys and values, none near it."""
    for memory in measured(8, strategy):
        assert memory.largest < KV_BYTES / 2
        assert memory.largest < LENGTH * LENGTH * 4 / 16


def test_the_count_itself_sees_what_is_alive():
    with LiveMemory() as memory:
        a = torch.zeros(1000)
        b = a + 1
        del a
        torch.zeros(500)
        assert memory.peak == 8000
        assert b.numel() == 1000
    assert memory.largest == 4000
