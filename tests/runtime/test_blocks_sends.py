"""Test that a rank waits for its sends, not before the receiver needs them, and then releases the buffer."""

from __future__ import annotations

import pytest
import torch

import burst_portable as bp
from burst_portable.runtime.prepared_call import Observer, Posting
from tests.support.seams import calls_with

RANKS = 3


class Noted:
    """A handle that records the wait for it."""

    def __init__(self, handle, log, name):
        self._handle, self._log, self._name = handle, log, name

    def wait(self):
        self._log.append(self._name)
        self._handle.wait()


class Noting(Observer):
    """Record what a rank computes and sends, and the messages for which it waits."""

    def __init__(self, log):
        self._log = log

    def computes(self, compute, like, *, backward):
        self._log.append(compute.label)
        return super().computes(compute, like, backward=backward)

    def posts(self, sends, receives, step, *, backward):
        return NotingPosting(self._log, [move for move, _ in sends])


class NotingPosting(Posting):
    def __init__(self, log, moves):
        self._log, self._moves = log, moves

    def wrap(self, leaving, arriving):
        self._log += [f"{move.label} leaves for {move.target}" for move in self._moves]
        names = [f"{move.label} left for {move.target}" for move in self._moves]
        return [Noted(handle, self._log, name) for handle, name in zip(leaving, names, strict=True)], arriving


def logs(backward=False, **call):
    """Return by rank the record of a forward pass, or of a backward pass only."""
    found = {rank: [] for rank in range(RANKS)}

    def work(mesh):
        log = found[mesh.rank]
        with calls_with(observer=lambda prepared: Noting(log)):
            q, k, v = (torch.ones(1, 4, 2, 8, requires_grad=True) for _ in "qkv")
            out = bp.attention(q, k, v, mesh=mesh, layout="contiguous", **call)
            if backward:
                log.clear()
                out.sum().backward()

    bp.run_threads(RANKS, work)
    return found


def test_ring_waits_for_sends_one_step_later():
    found = logs(mask="full", strategy="ring")
    assert found[0] == [
        "kv0 leaves for 1", "q0 x kv0",
        "kv2 leaves for 1", "q0 x kv2", "kv0 left for 1",
        "q0 x kv1", "kv2 left for 1",
    ]  # fmt: skip


def test_ranks_without_work_wait_for_their_sends():
    assert logs(mask="causal", strategy="ring") == {
        0: ["kv0 leaves for 1", "q0 x kv0", "kv0 left for 1"],
        1: ["kv1 leaves for 2", "q1 x kv1", "kv0 leaves for 2", "q1 x kv0", "kv1 left for 2", "kv0 left for 2"],
        2: ["q2 x kv2", "q2 x kv1", "q2 x kv0"],
    }


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("mask", ["causal", "full"])
@pytest.mark.parametrize(
    "strategy",
    [
        *("ring", "burst", "double_ring", bp.make_strategy("ring", transfer="direct", local_block_order="last")),
        # Causal: rank 0 is finished before any of its two sends is needed.
        bp.make_strategy("ring", transfer="direct", prefetch_steps=2),
    ],
    ids=str,
)
def test_all_sends_complete_when_pass_ends(strategy, mask, backward):
    for rank, log in logs(backward, mask=mask, strategy=strategy).items():
        leaving = sorted(line for line in log if "leaves" in line)
        assert sorted(line.replace("left", "leaves") for line in log if "left" in line) == leaving
        assert leaving or (mask, rank) != ("full", 0)
