"""Test which blocks are sent to which ranks."""

from __future__ import annotations

from burst_portable.mask import Mask
from tests.support.plans import make_plan


def test_ring_route_of_three_ranks():
    """Rank 1, full mask: its own block, then rank 0's, then rank 2's; K and V go to rank 2."""
    steps = make_plan(Mask.full(), "contiguous", ranks=3, length=9).forward.steps_of(1)
    assert [s.compute.k_owners for s in steps] == [(1,), (0,), (2,)]
    assert [(m.owner, m.target, m.post_step, m.wait_step) for s in steps for m in s.sends] == [
        (1, 2, 0, 1),
        (0, 2, 1, 2),
    ]
    assert [(m.owner, m.source) for s in steps for m in s.receives] == [(0, 0), (2, 0)]
    backward = make_plan(Mask.full(), "contiguous", ranks=3, length=9, strategy="burst").backward.steps_of(1)
    assert [s.compute.q_owners for s in backward if s.compute] == [(1,), (0,), (2,)]
    # dQ of rank 0 is computed at step 1 and forwarded to rank 2. dQ of rank 2 is complete at step 2 and sent to its
    # owner.
    assert [(m.owner, m.target) for s in backward for m in s.result_sends] == [(0, 2), (2, 2)]


def test_only_ranks_that_need_a_block_receive_it():
    """For a window no wider than a shard, each rank receives from one neighbor."""
    for strategy in ("ring", "burst", "double_ring"):
        plan = make_plan(Mask.window(8), "contiguous", strategy, ranks=8, length=64)
        received = [len([m for s in plan.forward.steps_of(r) for m in s.receives]) for r in range(8)]
        assert sum(received) == 7 if strategy != "double_ring" else sum(received) < 56
    causal = make_plan(Mask.causal(), "contiguous", "ring", ranks=8, length=64)
    assert sum(len(s.receives) for r in range(8) for s in causal.forward.steps_of(r)) == 28


def test_direct_transfer_sends_visible_rows_only():
    plan = make_plan(Mask.window(3), "contiguous", "ring", ranks=4, length=64, transfer="direct")
    (move,) = [m for s in plan.forward.steps_of(2) for m in s.receives]
    assert move.rows == ((13, 16),)
    whole = make_plan(Mask.window(3), "contiguous", "ring", ranks=4, length=64)
    (move,) = [m for s in whole.forward.steps_of(2) for m in s.receives]
    assert move.rows == ((0, 16),)
