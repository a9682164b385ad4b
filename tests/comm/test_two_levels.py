"""Test that a transfer between nodes has a full round inside the node: no rank waits for it earlier, on either side."""

from __future__ import annotations

from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch

import burst_portable as bp
from burst_portable.comm import torch_dist, two_levels
from burst_portable.comm.base import Message, Transport
from burst_portable.comm.local import Fabric, LocalTransport
from burst_portable.comm.two_levels import TwoLevelTransport
from burst_portable.errors import CommunicationTimeoutError, MismatchError
from burst_portable.strategies.registry import make_strategy

RANKS, NODE = 8, 4


class Watched(Transport):
    """Count the steps that post messages, and record when each message is posted and waited for."""

    def __init__(self, wrapped: Transport) -> None:
        super().__init__(wrapped.name, wrapped.rank, wrapped.size)
        self.wrapped = wrapped
        self.posted = 0
        self.waits: list[tuple[bool, int]] = []  # (whether it crosses nodes, number of later posts before the wait)

    def post(self, sends, receives, label=""):
        if not label.startswith(("forward", "backward")):
            return self.wrapped.post(sends, receives, label)
        self.posted += 1
        posted = self.wrapped.post(sends, receives, label)
        crosses = ([m.peer // NODE != self.rank // NODE for m in messages] for messages in (sends, receives))
        return tuple(
            [Waited(self, handle, far, self.posted) for handle, far in zip(*pair, strict=True)]
            for pair in zip(posted, crosses, strict=True)
        )

    def share(self, data, label="share", timeout=None):
        return self.wrapped.share(data, label, timeout)


class Waited:
    def __init__(self, transport, handle, crosses, at):
        self.transport, self.handle, self.crosses, self.at = transport, handle, crosses, at

    def wait(self):
        self.transport.waits.append((self.crosses, self.transport.posted - self.at))
        self.handle.wait()


@pytest.mark.parametrize(("travels", "first"), [("kv", 2), ("q", 3)])
def test_transfers_between_nodes_wait_for_end_of_round(travels, first):
    """All steps of a round except the last one post messages. In backward, they post gradients too.

    In backward, the first `first` steps of the local round precede the other node's round, by float32 bytes. The rest
    follows it.
    """
    strategy = make_strategy("double_ring", ranks_per_node=NODE, backward_circulates=travels)

    def work(mesh):
        transport = Watched(mesh.transport("cpu"))
        own = bp.Mesh(mesh.rank, RANKS, lambda _: transport)
        generator = torch.Generator().manual_seed(mesh.rank)
        q, k, v = (torch.randn(1, 8, 2, 8, generator=generator).requires_grad_() for _ in range(3))
        out = bp.attention(q, k, v, mask="full", mesh=own, strategy=strategy, layout="contiguous", seq_len=8 * RANKS)
        forward, transport.waits = transport.waits, []
        out.sum().backward()
        return forward, transport.waits

    for forward, backward in bp.run_threads(RANKS, work):
        # Each rank receives one block and sends one. In backward, this includes gradients, after the round of the other
        # node.
        crossed, back = ([later for crosses, later in waits if crosses] for waits in (forward, backward))
        assert len(crossed) == 2
        assert min(crossed) == NODE - 2
        assert back[0] == 2 * (first - 1) - 1
        assert len(back) == 4
        assert back[2:] == 2 * [2 * (NODE - first) - 1]


@pytest.mark.parametrize(("travels", "first"), [("kv", 1), ("q", 2)])
def test_gradients_between_nodes_have_a_full_round(travels, first):
    plan = bp.plan(
        seq_len=96,
        ranks=RANKS,
        heads=4,
        kv_heads=2,
        head_dim=8,
        mask="full",
        strategy=make_strategy("double_ring", ranks_per_node=NODE, backward_circulates=travels),
    )
    moves = [
        m for rank in range(RANKS) for s in plan.backward.steps_of(rank) for m in (*s.receives, *s.result_receives)
    ]
    steps = {(m.is_gradient, m.source // NODE != m.target // NODE): set() for m in moves}
    for m in moves:
        steps[m.is_gradient, m.source // NODE != m.target // NODE].add(m.wait_step - m.post_step)
    assert steps == {(False, False): {1}, (False, True): {first}, (True, False): {1}, (True, True): {NODE}}


def test_different_node_sizes_raise_before_connecting():
    """No rank waits for connections that the other ranks do not make."""

    def never():
        raise AssertionError("nothing is connected")

    def work(mesh):
        plain = mesh.transport("cpu")
        levels = TwoLevelTransport(plain, never, 1) if mesh.rank else plain
        own = bp.Mesh(mesh.rank, 2, lambda _: levels)
        q = torch.ones(1, 8, 2, 4)
        with pytest.raises(MismatchError, match="ranks per node: not given on rank 0 but 1 on rank 1"):
            bp.attention(q, q, q, mesh=own, strategy="ring")

    bp.run_threads(2, work)


def test_rank_that_does_not_connect_is_named(monkeypatch):
    """torch would wait 30 minutes, and its error names no rank."""
    asked = {}

    def told_of(timeout):
        return {"timeout": timeout, "pg_options": "a backend's own"}

    def new_group(ranks, **options):
        asked.update(options)
        raise RuntimeError("Wait timeout")

    group = SimpleNamespace(
        new_group=new_group,
        get_rank=lambda _: 1,
        get_process_group_ranks=lambda _: [0, 1, 2, 3],
        get_backend_config=lambda _: "gloo",
    )
    monkeypatch.setattr(two_levels, "dist", group)
    monkeypatch.setattr(torch_dist, "exchange_error_notes", lambda *_: "no report from rank 3")
    transport = two_levels.with_two_levels(lambda _: LocalTransport(Fabric(1, 1.0), 0), None, 2, 5.0, told_of)
    told = "rank 1, connecting nodes: meeting all ranks took too long; got Wait timeout; no report from rank 3"
    with pytest.raises(CommunicationTimeoutError, match=told):
        transport.begin()
    assert (asked["timeout"], asked["pg_options"]) == (timedelta(seconds=10), "a backend's own")


def test_post_returns_handles_in_order():
    """Messages within and between nodes are mixed; a level without messages posts nothing."""

    def handles(name):
        class One(Transport):
            def __init__(self):
                super().__init__(name, 1, 4)
                self.posts = []

            def post(self, sends, receives, label=""):
                self.posts.append(label)
                return [f"{name} to {m.peer}" for m in sends], [f"{name} from {m.peer}" for m in receives]

        return One()

    near, far = handles("near"), handles("far")
    transport, buffer = TwoLevelTransport(near, lambda: far, 2), torch.empty(1, dtype=torch.uint8)
    assert transport.post([Message(buffer, 3)], [], "before")[0] == ["near to 3"]
    transport.begin()
    posted = transport.post([Message(buffer, r) for r in (3, 0, 2)], [Message(buffer, r) for r in (0, 2)], "mixed")
    assert posted == (["far to 3", "near to 0", "far to 2"], ["near from 0", "far from 2"])
    assert transport.post([], [Message(buffer, 0)], "inside") == ([], ["near from 0"])
    assert (near.posts, far.posts) == (["before", "mixed", "inside"], ["mixed"])
