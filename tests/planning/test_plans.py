"""Verify plans of every strategy without running them, and the verifier itself with planted mistakes."""

from __future__ import annotations

from burst_portable.planning.routes import RingRoute
from burst_portable.strategies.planner import plan
from tests.support.plans import make_plan


def test_plans_are_hashable():
    assert hash(make_plan()) == hash(make_plan())
    assert make_plan() == make_plan()
    assert make_plan() != make_plan(strategy="burst")
    assert RingRoute(4) == RingRoute(4)


def test_plan_prints_a_few_lines():
    made = plan(seq_len=4096, ranks=8, heads=8, kv_heads=2, v_head_dim=64, mask="window:100", strategy="ulysses")
    head, mask, forward, backward = str(made).splitlines()
    sizes = "8 query and 2 K/V heads of 128 (values 64), 2 bytes a number"
    assert head == f"ulysses over 8 ranks, layout zigzag, 4,096 tokens, batch 1, {sizes}"
    assert mask == f"mask      window:100:0: {4096 * 101 - 5050:,} pairs per head"
    assert forward.endswith("then out back (all_to_all)")
    assert backward.endswith("then gradients back (all_to_all)")


def test_plan_of_one_rank_prints_no_communication():
    assert str(plan(seq_len=64, ranks=1, heads=2)).splitlines()[2:] == [
        "forward   no communication, one rank holds all tokens",
        "backward  no communication, one rank holds all tokens",
        "why       one rank: no communication, so nothing to choose",
    ]
