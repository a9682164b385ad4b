"""Test blocks of other ranks: the tensors that kernels get, and the number of blocks in memory at once."""

from __future__ import annotations

from collections import defaultdict

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

import burst_portable as bp
from burst_portable.comm.base import WrappedTransport
from burst_portable.kernels.base import WrappedKernel
from burst_portable.runtime.prepared_call import Observer
from tests.support.seams import calls_with


class Noted:
    """Record the inputs of backward kernels and, by rank, the number of blocks in memory at each forward step."""

    def __init__(self):
        self.in_one_piece: defaultdict[str, set[bool]] = defaultdict(set)
        self.dtypes: set[torch.dtype] = set()
        self.receive_buffers: defaultdict[int, list[StorageWeakRef]] = defaultdict(list)
        self.held: defaultdict[int, list[int]] = defaultdict(list)
        self.copied: set[tuple[bool, int]] = set()


class NotingKernel(WrappedKernel):
    def __init__(self, ranks_per_node, noted):
        super().__init__(ranks_per_node)
        self._noted = noted

    def attend_backward(self, x, tiles, call, *, into):
        for name in ("q", "dout", "lse", "delta"):
            if (tensor := getattr(x, name)) is not None:  # delta is used only if queries circulate
                self._noted.in_one_piece[name].add(tensor.is_contiguous())
        self._noted.dtypes.update(sums.dtype for sums in into)
        super().attend_backward(x, tiles, call, into=into)


class NotingTransport(WrappedTransport):
    def __init__(self, ranks_per_node, noted):
        super().__init__(ranks_per_node)
        self._noted = noted

    def receive_buffer(self, size, device, peer, place=None):
        made = super().receive_buffer(size, device, peer, place)
        self._noted.receive_buffers[self.rank].append(StorageWeakRef(made.untyped_storage()))
        return made


class NotingObserver(Observer):
    def __init__(self, rank, noted):
        self._rank, self._noted = rank, noted

    def computes(self, compute, like, *, backward):
        if not backward:
            alive = sum(not one.expired() for one in self._noted.receive_buffers[self._rank])
            self._noted.held[self._rank].append(alive)
        return super().computes(compute, like, backward=backward)

    def copies(self, device, step, *, backward):
        self._noted.copied.add((backward, step))
        return super().copies(device, step, backward=backward)


def attend(ranks, strategy, dtype=torch.float32):
    """Run both passes with the full mask; return the record."""
    noted = Noted()

    def work(mesh):
        with calls_with(
            observer=lambda prepared: NotingObserver(mesh.rank, noted),
            kernel=lambda kernel: NotingKernel(kernel, noted),
            transport=lambda transport: NotingTransport(transport, noted),
        ):
            q, k, v = (torch.ones(1, 4, 2, 8, dtype=dtype, requires_grad=True) for _ in "qkv")
            bp.attention(q, k, v, mesh=mesh, mask="full", layout="contiguous", strategy=strategy).sum().backward()

    bp.run_threads(ranks, work)
    return noted


def test_burst_reads_queries_in_place_of_message():
    """Kernels need contiguous LSE and delta; copies of Q and dO would be unnecessary."""
    noted = attend(3, "burst")
    assert {name: seen == {True} for name, seen in noted.in_one_piece.items()} == {
        "q": False, "dout": False, "lse": True, "delta": True
    }  # fmt: skip


@pytest.mark.parametrize("strategy", ["ring", "burst"])
@pytest.mark.parametrize("gradients", ["float32", "input"])
def test_gradients_accumulate_in_float32(strategy, gradients):
    noted = attend(3, bp.make_strategy(strategy, gradient_comm_dtype=gradients), torch.bfloat16)
    assert noted.dtypes == {torch.float32}


def test_blocks_are_released_while_others_arrive():
    """A rank holds the block in use, the next one, the one being sent, and up to two delayed ones."""
    noted = attend(12, "ring")
    assert len(noted.held) == 12
    assert all(len(held) == 12 and max(held) <= 5 for held in noted.held.values())


def test_copies_are_recorded_with_their_step():
    """The local block is packed first; remote gradients are zeroed at 1 and 2 and added at 2 and 3."""
    noted = attend(3, "ring")
    assert noted.copied == {(False, 0), *((True, step) for step in range(4))}
