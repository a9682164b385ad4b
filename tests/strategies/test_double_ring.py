"""Test the plans of double rings: completeness, order of blocks, and the divided round inside a node."""

from __future__ import annotations

import dataclasses

import pytest

from burst_portable.mask import Mask
from burst_portable.planning.cost import rank_cost
from burst_portable.planning.hardware import HardwareSpec
from burst_portable.planning.plans import make_pass_plan
from burst_portable.planning.verify import verify
from tests.support.plans import make_plan


@pytest.mark.parametrize("ranks_per_node", [1, 2, 3, 4, 6, 12])
@pytest.mark.parametrize("travels", ["kv", "q"])
def test_double_ring_plans_are_valid_for_all_node_sizes(ranks_per_node, travels):
    for mask in (Mask.causal(), Mask.full(), Mask.window(9), Mask.documents((0, 7, 30, 96))):
        plan = make_plan(
            mask,
            ranks=12,
            length=96,
            strategy="double_ring",
            ranks_per_node=ranks_per_node,
            backward_circulates=travels,
        )
        assert verify(plan) == []


def test_double_ring_sends_block_of_next_node_first():
    plan = make_plan(Mask.full(), "contiguous", "double_ring", ranks=8, ranks_per_node=4)
    steps = plan.forward.steps_of(0)
    outer = [m for s in steps for m in s.sends if m.target == 4]
    assert [(m.owner, m.post_step, m.wait_step) for m in outer] == [(0, 0, 4)]


def test_double_ring_splits_round_of_own_node():
    """Rank 0 of two nodes of 4, full mask, backward: dK and dV have twice the bytes of K and V."""
    plan = make_plan(Mask.full(), "contiguous", "double_ring", ranks=8, ranks_per_node=4, backward_circulates="kv")
    steps = plan.backward.steps_of(0)
    assert [s.compute.k_owners[0] for s in steps if s.compute] == [0, 4, 7, 6, 5, 3, 2, 1]
    assert [[(m.owner, m.source) for m in s.receives] for s in steps][:8] == [
        [(4, 4)], [(7, 3)], [(6, 3)], [(5, 3)], [(3, 3)], [(2, 3)], [(1, 3)], [],
    ]  # fmt: skip
    assert [[(m.owner, m.target) for m in s.result_sends] for s in steps][:8] == [
        [], [(4, 1)], [(7, 1)], [(6, 1)], [(5, 5)], [(3, 1)], [(2, 1)], [(1, 1)],
    ]  # fmt: skip
    # A step takes one second, a block arrives in one second, and its gradients reach the owner rank in two.
    size = rank_cost(plan, "forward", 0, HardwareSpec(1, 1)).received / 7
    hardware = HardwareSpec(
        10 * 8 * 8 * 8 * 64 / 1e12, 1e6, 0.0, 0.0, ranks_per_node=4, inter_node_bandwidth=size / 1e9
    )
    assert rank_cost(plan, "backward", 0, hardware).seconds == pytest.approx(8.0, rel=1e-6)


@pytest.mark.parametrize(
    ("ranks_per_node", "travels", "first"), [(16, "kv", 16), (8, "kv", 3), (8, "q", 4), (2, "kv", 1), (1, "q", 1)]
)
def test_double_ring_first_steps_depend_on_bytes(ranks_per_node, travels, first):
    """K and V are 1/3 of the inter-node bytes in backward; Q, dO, LSE and delta over 1/2."""
    plan = make_plan(
        Mask.causal(), ranks=16, strategy="double_ring", ranks_per_node=ranks_per_node, backward_circulates=travels
    )
    assert (plan.forward.route.first_steps, plan.backward.route.first_steps) == (ranks_per_node, first)
    whole = dataclasses.replace(plan.backward.route, first_steps=ranks_per_node)
    undivided = dataclasses.replace(plan, backward=make_pass_plan(plan.call, travels, whole, whole))
    assert verify(undivided) == []
    most = [
        max(rank_cost(p, "backward", r, HardwareSpec(1, 1)).blocks_held for r in range(16)) for p in (plan, undivided)
    ]
    assert most[0] <= most[1]
