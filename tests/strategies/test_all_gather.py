"""Test all_gather: coverage of pairs, bytes by closed forms, groups of heads, and attention against float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import burst_portable as bp
from burst_portable.conformance.cases import MASKS, Case
from burst_portable.errors import UnsupportedError
from burst_portable.planning.cost import plan_cost
from burst_portable.planning.hardware import HardwareSpec
from burst_portable.planning.plans import PASSES
from burst_portable.planning.schedule import interleave_groups
from burst_portable.planning.verify import verify
from burst_portable.strategies.all_gather import AllGatherStrategy
from tests.support.attention_cases import check_on_threads, sent_and_planned
from tests.support.live_memory import measured

HARDWARE = HardwareSpec(tflops=600.0, intra_node_bandwidth=200.0)
CASES = [
    Case(strategy="all_gather", ranks=2, heads="mqa", mask="window", layout="striped"),
    Case(strategy="all_gather", ranks=3, dtype=torch.float64, mask="custom", sinks=True),
    Case(strategy="all_gather", ranks=3, heads="wide_values", dtype=torch.bfloat16, mask="full", softcap=5.0),
    Case(strategy="all_gather", ranks=4, heads="mha", mask="documents", layout="whole_documents", batch=1),
    Case(strategy="all_gather(head_groups=1)", ranks=4, heads="mha", mask="fully_masked_rows", layout="contiguous"),
]


@pytest.mark.parametrize("peers", [False, True], ids=["messages", "peer_copies"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_all_gather_matches_oracle(case, peers):
    """Heads are in 1, 3 or 4 groups. In the fourth case, most ranks need no message."""
    check_on_threads(case, peers=peers)


@pytest.mark.parametrize("layout", ["zigzag", "contiguous", "striped"])
@pytest.mark.parametrize("groups", [None, 1, 6])
def test_all_gather_plan_covers_every_pair(layout, groups):
    for mask in MASKS:
        for ranks in (1, 2, 3, 5, 8):
            case = Case(mask, layout, ranks=ranks)
            assert verify(AllGatherStrategy(groups).plan(case.make_call())) == []


@pytest.mark.parametrize("groups", [1, 2, 8])
def test_all_gather_bytes_and_launches_are_closed_forms(groups):
    """Bytes are those of an all-gather and a reduce-scatter, for any number of groups."""
    ranks, rows, kv_heads, d, dv = 4, 256, 8, 64, 32
    plan = bp.plan(
        seq_len=ranks * rows, ranks=ranks, heads=16, kv_heads=kv_heads, head_dim=d, v_head_dim=dv, mask="full",
        strategy=AllGatherStrategy(groups),
    )  # fmt: skip
    block = rows * kv_heads * (d + dv)
    costs = plan_cost(plan, HARDWARE).per_rank
    assert {c.sent for c in costs["forward"]} == {(ranks - 1) * block * 2}
    assert {c.received for c in costs["backward"]} == {(ranks - 1) * block * (2 + 4)}  # gradients in float32
    for name in PASSES:
        assert {c.launches for c in costs[name]} == {groups}
        assert {c.blocks_held for c in costs[name]} == {min(2, groups) * (ranks - 1) * block * 2 // groups}
        assert sum(c.flops for c in costs[name]) == 2 * plan.call.num_pairs * 16 * (
            d + dv if name == "forward" else 3 * d + 2 * dv
        )


@pytest.mark.parametrize("strategy", ["all_gather", "all_gather(head_groups=1)"])
def test_all_gather_sends_planned_bytes(strategy):
    for ranks, layout in ((3, "zigzag"), (4, "striped")):
        sent, planned = sent_and_planned(Case(strategy=strategy, ranks=ranks, layout=layout, dtype=torch.bfloat16))
        assert sent == planned


def test_all_gather_groups_divide_kv_heads():
    size = {"seq_len": 64, "ranks": 2, "heads": 12}
    assert [bp.plan(**size, kv_heads=n, strategy="all_gather").head_groups for n in (1, 2, 3, 6, 12)] == [1, 2, 3, 3, 4]
    assert bp.plan(seq_len=64, ranks=1, heads=12, strategy="all_gather").head_groups == 1
    with pytest.raises(UnsupportedError, match="in 5 groups; got 6 K/V heads; allowed: head_groups of 1, 2, 3, 6"):
        bp.plan(**size, kv_heads=6, strategy=AllGatherStrategy(5))


def test_all_gather_groups_hide_messages():
    """All messages but those of the first group arrive while the group before them computes."""
    size = {"seq_len": 131072, "ranks": 8, "heads": 32, "kv_heads": 8}
    costs = [plan_cost(bp.plan(**size, strategy=AllGatherStrategy(n)), HARDWARE).per_rank for n in (1, 4)]
    whole, groups = (cost["forward"][0] for cost in costs)
    assert whole.seconds == pytest.approx(whole.compute_seconds + whole.link_seconds)
    assert groups.seconds == pytest.approx(groups.compute_seconds + groups.link_seconds / 4)
    assert groups.seconds < whole.seconds


def test_all_gather_groups_reduce_memory():
    """Measured: the peak beyond the shard and the results is about half with four groups, of which two are held."""
    one, four = (max(m.peak for m in measured(4, AllGatherStrategy(n), kv_heads=4)) for n in (1, 4))
    assert four < 0.75 * one


def test_interleave_groups_runs_each_group_one_step_later():
    plan = bp.plan(seq_len=64, ranks=2, heads=4, mask="full", strategy="all_gather")
    order = [(group, step.index) for group, step in interleave_groups(plan.backward.steps_of(0), 3)]
    assert order == [(0, 0), (1, 0), (0, 1), (2, 0), (1, 1), (0, 2), (2, 1), (1, 2), (2, 2)]


def test_verify_detects_missing_group():
    plan = bp.plan(seq_len=64, ranks=2, heads=8, strategy="all_gather")
    wrong = verify(replace(plan, head_groups=3))
    assert wrong[0] == "forward: 3 groups of 2 query and 2 K/V heads are not 8 and 8"
