"""Test dispatch: balance and bytes over the layout "dispatched", coverage of pairs, and attention against float64."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import product

import pytest
import torch

import burst_portable as bp
from burst_portable.bench.masks import MASKS as BENCH_MASKS
from burst_portable.conformance.cases import MASKS, Case
from burst_portable.mask import Mask, Region
from burst_portable.planning.cost import plan_cost
from burst_portable.planning.hardware import HardwareSpec
from burst_portable.planning.plans import PASSES
from burst_portable.planning.verify import verify
from burst_portable.strategies.dispatch import DispatchStrategy
from tests.support.attention_cases import check_on_threads, sent_and_planned

HARDWARE = HardwareSpec(tflops=600.0, intra_node_bandwidth=200.0)
LENGTH = 32768
CASE = Case(strategy="dispatch", layout="dispatched", ranks=4, batch=1)
CASES = [
    replace(CASE, ranks=2, mask="documents", heads="wide_values", dtype=torch.bfloat16, sinks=True),
    replace(CASE, ranks=3, mask="custom", heads="mqa", dtype=torch.float64, softcap=5.0),
    replace(CASE, mask="share_question", heads="mha", batch=2),
    replace(CASE, mask="window_both", strategy="dispatch(stages=1)"),
    replace(CASE, mask="fully_masked_rows"),
]


def documents(count: int, seed: int) -> Mask:
    """Return causal documents of random lengths."""
    ends = random.Random(seed).sample(range(1, LENGTH), count - 1)
    return Mask.documents((0, *sorted(ends), LENGTH))


def sparse(share: float, seed: int) -> Mask:
    """Return a block-sparse mask: the diagonal, and this share of the earlier blocks of 1,024 tokens at random."""
    choose, starts = random.Random(seed), range(0, LENGTH, 1024)
    blocks = [(q, k) for q in starts for k in starts if q == k or (k < q and choose.random() < share)]
    return Mask(tuple(Region(q, q + 1024, k, k + 1024) for q, k in blocks), f"sparse:{share}")


IRREGULAR = [documents(6, 9), documents(12, 3), documents(40, 5), sparse(0.1, 2), sparse(0.3, 4)]
REGULAR = [Mask.causal(), Mask.full(), Mask.window(4096), Mask.share_question((8192, *[6144] * 4))]


def plan_of(mask: Mask, ranks: int, layout: str, strategy: str = "dispatch"):
    return bp.plan(
        seq_len=LENGTH, ranks=ranks, heads=8, kv_heads=2, head_dim=64, mask=mask, layout=layout, strategy=strategy
    )


def sent(plan) -> int:
    """Return the bytes that all ranks send in both passes."""
    return sum(cost.sent for costs in plan_cost(plan, HARDWARE).per_rank.values() for cost in costs)


@pytest.mark.parametrize("ranks", [4, 8])
@pytest.mark.parametrize("mask", [*IRREGULAR, *REGULAR], ids=str)
def test_dispatch_is_balanced_and_sends_no_more_than_a_ring(mask, ranks):
    """Over the same layout, and for irregular masks over a zigzag, whose busiest rank computes far more."""
    plan = plan_of(mask, ranks, "dispatched")
    assert {plan.layout.count(rank) for rank in range(ranks)} == {LENGTH // ranks}
    assert plan_cost(plan, HARDWARE).imbalance() < 1.05
    assert sent(plan) <= sent(plan_of(mask, ranks, "dispatched", "ring"))
    if mask in IRREGULAR:
        zigzag = plan_of(mask, ranks, "zigzag", "ring")
        assert ranks == 4 or plan_cost(zigzag, HARDWARE).imbalance() > 1.3
        assert sent(plan) <= sent(zigzag)


@pytest.mark.parametrize("name", BENCH_MASKS)
def test_dispatched_layout_balances_the_masks_of_the_benchmark(name):
    assert plan_cost(plan_of(BENCH_MASKS[name](LENGTH), 8, "dispatched"), HARDWARE).imbalance() < 1.05


@pytest.mark.parametrize("peers", [False, True], ids=["messages", "peer_copies"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_dispatch_matches_oracle(case, peers):
    check_on_threads(case, peers=peers)


@pytest.mark.parametrize("layout", ["dispatched", "zigzag", "striped"])
def test_dispatch_plan_covers_every_pair(layout):
    for mask, ranks, stages in product(MASKS, (1, 3, 8), (1, 3)):
        assert verify(DispatchStrategy(stages).plan(Case(mask, layout, ranks=ranks).make_call())) == []


@pytest.mark.parametrize(("stages", "launches"), [(1, 1), (2, 2), (7, 7), (20, 7)])
def test_dispatch_bytes_and_launches_are_closed_forms(stages, launches):
    """Full mask: all rows of the other ranks, and their gradients in float32. Backward, the local block is split."""
    ranks, rows, kv_heads, d, dv = 8, 256, 2, 64, 32
    plan = bp.plan(
        seq_len=ranks * rows, ranks=ranks, heads=4, kv_heads=kv_heads, head_dim=d, v_head_dim=dv, mask="full",
        strategy=DispatchStrategy(stages),
    )  # fmt: skip
    block = rows * kv_heads * (d + dv)
    costs = plan_cost(plan, HARDWARE).per_rank
    assert {c.sent for c in costs["forward"]} == {(ranks - 1) * block * 2}
    assert {c.sent for c in costs["backward"]} == {(ranks - 1) * block * (2 + 4)}
    assert [{c.launches for c in costs[name]} for name in PASSES] == [{1 + launches}, {2 + launches}]


def test_group_cast_of_a_sparse_mask_sends_each_needed_row_once():
    """A rank needs the blocks of keys that its blocks of queries see, except its own."""
    mask, ranks = sparse(0.1, 2), 8
    plan = plan_of(mask, ranks, "dispatched")
    block_of = [{p // 1024 for p in plan.layout.positions(rank)} for rank in range(ranks)]
    assert sum(map(len, block_of)) == LENGTH // 1024
    seen = [{r.k_start // 1024 for r in mask.regions if r.q_start // 1024 in held} - held for held in block_of]
    row = 2 * 64 * 2  # K/V heads, head size, K and V
    costs = plan_cost(plan, HARDWARE).per_rank
    assert [c.received for c in costs["forward"]] == [1024 * len(one) * row * 2 for one in seen]
    moves = [m for rank in range(ranks) for step in plan.steps("forward", rank) for m in step.receives]
    assert max(len(m.rows) for m in moves) > 1


@pytest.mark.parametrize("strategy", ["dispatch", "dispatch(stages=1)"])
def test_transport_counts_the_bytes_of_the_plan(strategy):
    for ranks, mask in ((2, "documents"), (3, "custom"), (4, "share_question")):
        counted, planned = sent_and_planned(
            replace(CASE, strategy=strategy, ranks=ranks, mask=mask, dtype=torch.bfloat16)
        )
        assert counted == planned


def test_functions_take_the_layout_by_name_with_the_mask():
    mask = Mask.documents((0, 10, 37, 66))
    full = [torch.randn(1, 66, heads, 8, dtype=torch.float64) for heads in (4, 2, 2)]

    def work(mesh):
        q, k, v = (bp.shard(x, mesh, layout="dispatched", mask=mask) for x in full)
        out = bp.attention(q, k, v, mask=mask, mesh=mesh, layout="dispatched", strategy="dispatch", seq_len=66)
        return bp.unshard(out, mesh, seq_len=66, layout="dispatched", mask=mask)

    expected = bp.attention(*full, mask=mask)
    for out in bp.run_threads(4, work):
        torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)
