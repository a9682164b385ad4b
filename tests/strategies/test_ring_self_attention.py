"""Test ring_self_attention: two rings and rows of scores against float64, its bytes, memory and limit."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise, product

import pytest
import torch

import burst_portable as bp
from burst_portable.conformance.cases import MASKS, Case
from burst_portable.conformance.oracle import find_violations
from burst_portable.errors import UnsupportedError
from burst_portable.planning.cost import plan_cost
from burst_portable.planning.hardware import HardwareSpec
from burst_portable.planning.messages import inboxes, message_sizes
from burst_portable.planning.plans import PASSES
from burst_portable.planning.verify import verify
from burst_portable.profiling.ablation import ablate
from burst_portable.strategies.ring_self_attention import RingSelfAttentionStrategy
from tests.support.attention_cases import check_on_threads, expected, make_inputs, on_one_rank, sent_and_planned
from tests.support.live_memory import HEADS, LENGTH, measured
from tests.support.plans import make_plan

HARDWARE = HardwareSpec(tflops=600.0, intra_node_bandwidth=200.0)
CASE = Case(strategy="ring_self_attention", ranks=4, batch=1)
CASES = [
    replace(CASE, ranks=2, heads="wide_values", dtype=torch.bfloat16, sinks=True),
    replace(CASE, ranks=3, heads="mqa", mask="window", softcap=5.0),
    replace(CASE, heads="mha", mask="documents", batch=2),
    replace(CASE, heads="wide_values", mask="custom", layout="contiguous", dtype=torch.float64),
    replace(CASE, mask="fully_masked_rows", layout="contiguous"),
]


@pytest.mark.parametrize("peers", [False, True], ids=["messages", "peer_copies"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_ring_self_attention_matches_oracle(case, peers):
    """Windows and documents interrupt the rings, so an owner receives gradients from several ranks at once."""
    check_on_threads(case, peers=peers)


@pytest.mark.parametrize("padding", [torch.nan, torch.inf])
@pytest.mark.parametrize("strategy", ["ring_self_attention", "ring"])
@pytest.mark.parametrize("sinks", [False, True])
def test_values_of_tokens_without_pairs_change_nothing(strategy, padding, sinks):
    """Padding may be fresh memory. A weight of 0 times an infinity or NaN is NaN."""
    case = replace(CASE, strategy=strategy, ranks=3, mask="fully_masked_rows", layout="striped", sinks=sinks)
    clean = make_inputs(case)
    q, k, v = (x.clone() for x in (clean.q, clean.k, clean.v))
    (region,) = case.make_mask().regions
    for x in (q, k, v):
        x[:, region.q_stop :] = padding
    answers = bp.run_threads(case.ranks, lambda mesh: on_one_rank(mesh, case, replace(clean, q=q, k=k, v=v)))
    for answer in answers:
        assert not find_violations(answer, *expected(case, clean), case.dtype)


@pytest.mark.full
@pytest.mark.parametrize("ranks", [2, 3, 4, 6, 8])
@pytest.mark.parametrize("layout", ["zigzag", "contiguous", "striped"])
def test_ring_self_attention_over_peer_copies_matches_oracle(layout, ranks):
    """Conformance has the same product over messages."""
    for mask, heads in product(MASKS, ("gqa", "wide_values")):
        check_on_threads(replace(CASE, mask=mask, layout=layout, ranks=ranks, heads=heads), peers=True)


@pytest.mark.parametrize("layout", ["zigzag", "contiguous", "striped"])
def test_ring_self_attention_plan_covers_every_pair(layout):
    for mask, ranks in product(MASKS, (1, 2, 3, 5, 8)):
        assert verify(RingSelfAttentionStrategy().plan(Case(mask, layout, ranks=ranks).make_call())) == []


def test_messages_of_one_step_are_contiguous_in_each_round():
    """A receiver splits one buffer by the sizes of K, or of V; senders write at the offsets."""
    for mask, ranks in product(MASKS, (3, 4, 5)):
        plan = RingSelfAttentionStrategy().plan(Case(mask, "contiguous", ranks=ranks, heads="wide_values").make_call())
        for rank in range(ranks):
            for name, pass_plan in plan.passes():
                used = set()
                for tensor, offsets in zip(plan.tensors, inboxes(plan, rank).offsets[name], strict=True):
                    size = message_sizes(pass_plan, tensor)
                    for step in plan.steps(name, rank):
                        for moves in (step.arrivals, step.result_arrivals):
                            places = [(offsets[move], offsets[move] + size(move)) for move in moves]
                            assert all(before[1] == after[0] for before, after in pairwise(places))
                        moves = (*step.receives, *step.result_receives)
                        used |= {(offsets[move], offsets[move] + size(move), tensor, move) for move in moves}
                assert all(before[1] <= after[0] for before, after in pairwise(sorted(used)))


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_transport_counts_the_bytes_of_the_plan(ranks):
    sent, planned = sent_and_planned(replace(CASE, ranks=ranks, dtype=torch.bfloat16))
    assert sent == planned


def test_bytes_are_those_of_a_ring_in_twice_as_many_messages():
    """Forward: (ranks - 1) blocks of K, then of V. Backward: the same, and dK and dV in float32 one hop further."""
    ranks, rows, kv_heads, d, dv = 4, 256, 2, 64, 32
    size = {"seq_len": ranks * rows, "ranks": ranks, "heads": 4, "kv_heads": kv_heads, "head_dim": d, "v_head_dim": dv}
    plans = [bp.plan(**size, mask="full", strategy=name) for name in ("ring_self_attention", "ring")]
    (rsa, ring) = (plan_cost(plan, HARDWARE).per_rank for plan in plans)
    block = rows * kv_heads * (d + dv)
    assert {c.sent for c in rsa["forward"]} == {(ranks - 1) * block * 2}
    assert {c.sent for c in rsa["backward"]} == {(ranks - 1) * block * (2 + 4)}
    for name in PASSES:
        for ours, theirs in zip(rsa[name], ring[name], strict=True):
            assert (ours.sent, ours.received, ours.flops) == (theirs.sent, theirs.received, theirs.flops)
            assert (ours.messages, ours.launches) == (2 * theirs.messages, 2 * theirs.launches)
            assert ours.seconds > theirs.seconds
            assert ours.scores == (1 if name == "forward" else 2) * 4 * 4 * rows * ranks * rows
            assert theirs.scores == 0


def test_memory_grows_with_the_square_of_the_sequence():
    """Measured: the peak beyond the shard and the results has the rows of scores, in float32."""
    peak = max(m.peak for m in measured(4, "ring_self_attention"))
    scores = 4 * HEADS * LENGTH // 4 * LENGTH  # float32, on each of four ranks
    assert 2 * scores < peak < 2.5 * scores  # the rest is that of `ring`


def test_scores_above_the_limit_raise():
    size = {"seq_len": 131072, "ranks": 8, "heads": 32}
    with pytest.raises(UnsupportedError, match=r"too large; got 256\.0 GiB per rank.*max_score_gib=16.*'ring'"):
        bp.plan(**size, strategy="ring_self_attention")
    assert bp.plan(**size, strategy=RingSelfAttentionStrategy(max_score_gib=256)).score_rows
    assert "ring_self_attention" not in bp.plan(**size, strategy="auto").strategy


def test_explanation_names_no_other_kernel():
    q, k, v = (torch.randn(1, 8, 2, 8) for _ in "qkv")
    kernel = bp.explain(q, k, v, strategy="ring_self_attention").kernel
    assert (kernel.name, kernel.not_chosen) == ("score_rows", {})
    assert kernel.why == "the strategy stores rows of scores, which no kernel does"


def test_named_kernel_raises():
    with pytest.raises(UnsupportedError, match="stores rows of scores, which no kernel does; got kernel='reference'"):
        bp.attention(*(torch.randn(1, 8, 2, 8) for _ in "qkv"), strategy="ring_self_attention", kernel="reference")


def test_ablation_without_compute_and_communication_runs():
    def work(mesh):
        q, k, v = (torch.ones(1, 16, 4, 8, requires_grad=True) for _ in range(3))

        def step():
            out = bp.attention(q, k, v, mesh=mesh, strategy="ring_self_attention", seq_len=32)
            return torch.autograd.grad(out.sum(), (q, k, v))

        ablate(step, mesh=mesh, repeat=1, device="cpu")
        return step()

    for gradients in bp.run_threads(2, work):
        assert all(x.isfinite().all() for x in gradients)


def test_plan_states_two_rounds():
    plan = make_plan(bp.Mask.full(), "contiguous", "ring_self_attention", 4)
    assert plan.describe_pass("forward") == "all steps run with K, then again with V (ring)"
    assert (plan.rounds, plan.tensors) == (2, (0, 1))
