"""Blocks of other ranks: in which form kernels get them, and how many are in memory at once."""

from __future__ import annotations

from collections import defaultdict
from typing import ClassVar

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

import burst_portable as bp
from burst_portable.runtime.observer import PlainRuntime, installed


class Noting(PlainRuntime):
    """Notes down what a backward kernel gets, and, by rank, how many blocks are in memory at each forward step."""

    in_one_piece: ClassVar[dict[str, set[bool]]] = {}
    dtypes: ClassVar[set[torch.dtype]] = set()
    inboxes: ClassVar[dict[int, list[StorageWeakRef]]] = {}
    held: ClassVar[dict[int, list[int]]] = {}
    copied: ClassVar[set[tuple[bool, int]]] = set()

    def copying(self, device, step, *, backward):
        self.copied.add((backward, step))
        return super().copying(device, step, backward=backward)

    def inbox(self, moves, size, device):
        made = super().inbox(moves, size, device)
        self.inboxes[self.transport.rank].append(StorageWeakRef(made.untyped_storage()))
        return made

    def attend(self, compute, q, k, v, options, state):
        rank = self.transport.rank
        self.held[rank].append(sum(not one.expired() for one in self.inboxes[rank]))
        return super().attend(compute, q, k, v, options, state)

    def attend_backward(self, compute, queries, k, v, options, into):
        for name in ("q", "dout", "lse", "delta"):
            if (x := getattr(queries, name)) is not None:  # delta only where queries travel
                self.in_one_piece[name].add(x.is_contiguous())
        self.dtypes.update(sums.dtype for sums in into)
        super().attend_backward(compute, queries, k, v, options, into)


@pytest.fixture
def noted(monkeypatch):
    for name, empty in {"in_one_piece": set, "inboxes": list, "held": list}.items():
        monkeypatch.setattr(Noting, name, defaultdict(empty))
    monkeypatch.setattr(Noting, "dtypes", set())
    monkeypatch.setattr(Noting, "copied", set())
    return Noting


def attend(ranks, strategy, dtype=torch.float32):
    """Forward and backward, full mask, with the runtime above."""

    def work(mesh):
        token = installed.set(lambda runtime, plan, _: Noting(runtime.kernel, runtime.transport, runtime.places))
        try:
            q, k, v = (torch.ones(1, 4, 2, 8, dtype=dtype, requires_grad=True) for _ in "qkv")
            bp.attention(q, k, v, mesh=mesh, mask="full", layout="contiguous", strategy=strategy).sum().backward()
        finally:
            installed.reset(token)

    bp.run_local(ranks, work)


def test_queries_are_read_in_their_message_but_for_lse_and_delta(noted):
    """Kernels take those two in one piece; of Q and dO a copy would be needless."""
    attend(3, "burst")
    assert {name: seen == {True} for name, seen in noted.in_one_piece.items()} == {
        "q": False, "dout": False, "lse": True, "delta": True
    }  # fmt: skip


@pytest.mark.parametrize("strategy", ["ring", "burst"])
@pytest.mark.parametrize("gradients", ["wide", "narrow"])
def test_gradients_are_added_up_wide_however_they_travel(strategy, gradients, noted):
    attend(3, bp.make_strategy(strategy, gradients=gradients), torch.bfloat16)
    assert noted.dtypes == {torch.float32}


def test_blocks_are_let_go_while_others_come(noted):
    """Held: what comes next, what is computed with, what leaves; and one or two while a neighbour is late."""
    attend(12, "ring")
    assert len(noted.held) == 12
    assert all(len(held) == 12 and max(held) <= 5 for held in noted.held.values())


def test_copies_are_told_with_their_step(noted):
    """The own block is packed first; sums of others' gradients are zeroed at 1 and 2, what came is added at 2 and 3."""
    attend(3, "ring")
    assert noted.copied == {(False, 0), *((True, step) for step in range(4))}
