"""What a rank sends is waited for, and not before its receiver needs it: its buffer may not be let go of earlier."""

from __future__ import annotations

from typing import ClassVar

import pytest
import torch

import burst_portable as bp
from burst_portable.runtime.observer import PlainRuntime, installed

RANKS = 3


class Noted:
    """A handle that says when it is waited for."""

    def __init__(self, handle, log, name):
        self._handle, self._log, self._name = handle, log, name

    def wait(self):
        self._log.append(self._name)
        self._handle.wait()


class Noting(PlainRuntime):
    """Notes down what each rank computes and sends, and for which of its messages it waits."""

    logs: ClassVar[dict[int, list[str]]] = {}

    def attend(self, compute, q, k, v, options, state):
        self.logs[self.transport.rank].append(compute.label)
        return super().attend(compute, q, k, v, options, state)

    def attend_whole(self, compute, q, k, v, options):
        self.logs[self.transport.rank].append(compute.label)
        return super().attend_whole(compute, q, k, v, options)

    def post(self, sends, receives, step, *, backward):
        leaving, arriving = super().post(sends, receives, step, backward=backward)
        log = self.logs[self.transport.rank]
        log += [f"{move.label} leaves for {move.target}" for move, _ in sends]
        names = [f"{move.label} left for {move.target}" for move, _ in sends]
        return [Noted(handle, log, name) for handle, name in zip(leaving, names, strict=True)], arriving


def logs(monkeypatch, backward=False, **call):
    """By rank: of a forward pass, or of a backward pass alone."""
    monkeypatch.setattr(Noting, "logs", {rank: [] for rank in range(RANKS)})

    def work(mesh):
        token = installed.set(lambda runtime, plan, _: Noting(runtime.kernel, runtime.transport, runtime.places))
        try:
            q, k, v = (torch.ones(1, 4, 2, 8, requires_grad=True) for _ in "qkv")
            out = bp.attention(q, k, v, mesh=mesh, layout="contiguous", **call)
            if backward:
                Noting.logs[mesh.rank].clear()
                out.sum().backward()
        finally:
            installed.reset(token)

    bp.run_local(RANKS, work)
    return Noting.logs


def test_a_ring_waits_one_step_later(monkeypatch):
    found = logs(monkeypatch, mask="full", strategy="ring")
    assert found[0] == [
        "kv0 leaves for 1", "q0 x kv0",
        "kv2 leaves for 1", "q0 x kv2", "kv0 left for 1",
        "q0 x kv1", "kv2 left for 1",
    ]  # fmt: skip


def test_ranks_that_are_done_wait_for_what_others_still_take(monkeypatch):
    assert logs(monkeypatch, mask="causal", strategy="ring") == {
        0: ["kv0 leaves for 1", "q0 x kv0", "kv0 left for 1"],
        1: ["kv1 leaves for 2", "q1 x kv1", "kv0 leaves for 2", "q1 x kv0", "kv1 left for 2", "kv0 left for 2"],
        2: ["q2 x kv2", "q2 x kv1", "q2 x kv0"],
    }


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("mask", ["causal", "full"])
@pytest.mark.parametrize(
    "strategy",
    [
        *("ring", "burst", "double_ring", bp.make_strategy("ring", moves="fetch", own="last")),
        bp.make_strategy("ring", moves="fetch", ahead=2),  # causal, rank 0 is done before any of its two is needed
    ],
    ids=str,
)
def test_all_that_leaves_has_left_when_a_pass_ends(strategy, mask, backward, monkeypatch):
    for rank, log in logs(monkeypatch, backward, mask=mask, strategy=strategy).items():
        leaving = sorted(line for line in log if "leaves" in line)
        assert sorted(line.replace("left", "leaves") for line in log if "left" in line) == leaving
        assert leaving or (mask, rank) != ("full", 0)
