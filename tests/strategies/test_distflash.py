"""Test DISTFLASHATTN's schedule: its closed forms on the plan, and helper ranks against float64."""

from __future__ import annotations

from dataclasses import dataclass, replace
from fractions import Fraction

import pytest
import torch

import burst_portable as bp
from burst_portable.conformance.cases import Case
from burst_portable.conformance.oracle import find_violations
from burst_portable.errors import StrategyError
from burst_portable.mask import Mask, Region
from burst_portable.planning.cost import plan_cost
from burst_portable.planning.hardware import HardwareSpec
from burst_portable.planning.plans import PASSES, make_pass_plan
from burst_portable.planning.routes import DirectRoute, RingRoute
from burst_portable.planning.verify import verify
from burst_portable.strategies.distflash import DistFlashStrategy, EarlyRanks
from burst_portable.strategies.registry import make_strategy
from tests.support.attention_cases import check_on_threads, expected, make_inputs, on_one_rank, sent_and_planned
from tests.support.plans import make_plan

S = 128  # tokens per rank
CAUSAL = Case(strategy="distflash", layout="contiguous", ranks=4, length=107, batch=1)


def areas(steps) -> list[int]:
    return [step.compute.num_pairs if step.compute else 0 for step in steps]


@pytest.mark.parametrize("ranks", range(2, 10))
def test_idle_share_of_the_mask_area_has_the_closed_form(ranks):
    """A step lasts as long as its largest computation: idle is 0 for odd numbers of ranks, 1/(W + 1) for even ones."""
    plan = make_plan(Mask.causal(), "contiguous", "distflash", ranks, ranks * S)
    assert verify(plan) == []
    for name in PASSES:
        work = [areas(plan.steps(name, rank)) for rank in range(ranks)]
        last = ranks // 2
        busy = [[row[t] if t < len(row) else 0 for row in work] for t in range(last + 1)]
        half, full = S * (S + 1) // 2, S * S
        assert busy[0] == [half] * ranks
        assert busy[1:last] == [[full] * ranks] * (last - 1)
        assert busy[last] == ([full] * ranks if ranks % 2 else [0] * last + [full] * last)
        # Without the diagonal, of which a rank sees S more half pairs, a local block is half of a remote one.
        spent = ranks * (Fraction(1, 2) + last)
        assert 1 - Fraction(ranks * ranks, 2) / spent == (0 if ranks % 2 else Fraction(1, ranks + 1))


def closed_form(ranks: int, heads: int, kv_heads: int, d: int) -> tuple[int, int]:
    """Return the bytes that all ranks send in each pass for 16-bit tensors, over causal contiguous shards."""
    helped = sum(range(1, (ranks + 1) // 2))  # distances W - t above W/2: t pairs each
    fetched = ranks * (ranks - 1) // 2 - helped
    kv, q, lse = 2 * kv_heads * d, heads * d, heads  # numbers per token
    forward = fetched * 2 * kv + helped * (2 * q + 4 * (q + lse))
    backward = fetched * (2 + 4) * kv + helped * (2 * 2 * q + 4 * 2 * lse + 4 * q)
    return S * forward, S * backward


@pytest.mark.parametrize("ranks", range(2, 10))
def test_bytes_of_the_plan_have_the_closed_form(ranks):
    plan = bp.plan(
        seq_len=ranks * S, ranks=ranks, heads=8, kv_heads=4, head_dim=64, layout="contiguous", strategy="distflash"
    )
    cost = plan_cost(plan, HardwareSpec(1, 1)).per_rank
    sent = tuple(sum(one.sent for one in cost[name]) for name in PASSES)
    assert sent == closed_form(ranks, 8, 4, 64)


def test_plan_of_four_ranks_fetches_one_step_ahead():
    """Rank 0 helps rank 3; the result is merged one step later."""
    plan = make_plan(Mask.causal(), "contiguous", "distflash", 4)
    first, last = (plan.steps("forward", rank) for rank in (0, 3))
    assert [step.compute.label for step in last if step.compute] == ["q3 x kv3", "q3 x kv2", "q3 x kv1"]
    assert [step.compute.label for step in first if step.compute] == ["q0 x kv0", "q3 x kv0"]
    moves = [(m.label, m.source, m.target, m.post_step, m.wait_step) for s in first for m in s.receives]
    assert moves == [("q3", 3, 0, 0, 1)]
    results = [(m.label, m.source, m.target, m.post_step, m.wait_step) for s in last for m in s.result_receives]
    assert results == [("out3", 0, 3, 1, 2)]
    backward = [m.label for s in plan.steps("backward", 3) for m in s.result_arrivals]
    assert backward == ["dq3"]
    assert "helper" in plan.describe_pass("forward")


@pytest.mark.parametrize(("mask", "layout"), [(Mask.full(), "contiguous"), (Mask.causal(), "zigzag")], ids=str)
def test_plan_without_helpers_is_that_of_the_direct_ring(mask, layout):
    made = make_plan(mask, layout, "distflash", 5)
    direct = make_plan(mask, layout, make_strategy("ring", transfer="direct"), 5)
    for name in PASSES:
        assert [made.steps(name, r) for r in range(5)] == [direct.steps(name, r) for r in range(5)]


# The queries of the last rank see the first rank only: all of its results come from a helper.
FAR = Mask((Region(0, 80, 0, 80), Region(80, 107, 0, 20)), "far")


class WithMask(Case):
    """A case with the mask above."""

    def make_mask(self):
        return FAR


CASES = [
    replace(CAUSAL, ranks=2),
    replace(CAUSAL, ranks=3, heads="wide_values", sinks=True, strategy="distflash(prefetch_steps=64)"),
    CAUSAL,
    replace(CAUSAL, ranks=5, dtype=torch.bfloat16, heads="mqa", batch=2),
    replace(CAUSAL, ranks=4, mask="prefix", length=53),
    WithMask(strategy="distflash", layout="contiguous", ranks=4, length=107, dtype=torch.bfloat16),
]


@pytest.mark.parametrize("peers", [False, True], ids=["messages", "peer_copies"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_helpers_return_results_that_match_the_oracle(case, peers):
    check_on_threads(case, peers=peers)


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_transport_counts_the_bytes_of_the_plan(ranks):
    sent, planned = sent_and_planned(replace(CAUSAL, ranks=ranks, dtype=torch.bfloat16))
    assert sent == planned


def test_rounded_gradients_of_helpers_match_the_oracle():
    class Rounded(Case):
        def make_strategy(self):
            return DistFlashStrategy(gradient_comm_dtype="input")

    case = Rounded(strategy="distflash", layout="contiguous", ranks=4, length=107, dtype=torch.bfloat16)
    inputs = make_inputs(case)
    answer, *_ = bp.run_threads(4, lambda mesh: on_one_rank(mesh, case, inputs))
    assert find_violations(answer, *expected(case, inputs), case.dtype) == {}


@dataclass(frozen=True)
class Lost(DirectRoute):
    """Sends results to the next rank instead of the owner of the block."""

    def result_target(self, dependencies, owner, rank):
        return (owner + 1) % self.ranks


@dataclass(frozen=True)
class BothWays(EarlyRanks):
    """Lets a rank help another one from which it also needs keys."""

    def helps(self, pairs, q_owner, k_owner):
        return q_owner > k_owner


def test_verify_detects_lost_results_and_pairs_computed_twice():
    plan = make_plan(Mask.causal(), "contiguous", "distflash", 4)
    lost = make_pass_plan(plan.call, "kv", Lost(4, 1, 1, 1.0), helpers=EarlyRanks(4))
    assert any("result of block 3" in error for error in verify(replace(plan, forward=lost)))
    twice = replace(plan.forward)  # rank 3 computes with the keys of rank 0, as rank 0 does for it
    twice._steps[3] = make_pass_plan(plan.call, "kv", DirectRoute(4, 1, 1, 1.0)).steps_of(3)
    assert any("more than once: [(3, 0)]" in error for error in verify(replace(plan, forward=twice)))


@dataclass(frozen=True)
class NoDelay(DirectRoute):
    """Waits for results at the step that computes them."""

    def result_delay_steps(self, source, target):
        return 0


def test_verify_names_methods_for_wrong_results_of_helpers():
    plan = make_plan(Mask.causal(), "contiguous", "distflash", 4)
    early = make_pass_plan(plan.call, "kv", NoDelay(4, 1, 1, 1.0), helpers=EarlyRanks(4))
    waits = [error for error in verify(replace(plan, forward=early)) if "waits for out" in error]
    assert waits
    assert all("`result_delay_steps` must be at least 1" in error for error in waits)
    lost = make_pass_plan(plan.call, "kv", Lost(4, 1, 1, 1.0), helpers=EarlyRanks(4))
    unmatched = [error for error in verify(replace(plan, forward=lost)) if "only one of their two ranks" in error]
    assert unmatched
    assert all("`result_target` and `result_source`" in error for error in unmatched)


@dataclass(frozen=True)
class Chained(DirectRoute):
    """Sends results of a helper to the next helper of the same rank, as a ring does with gradients."""

    def result_target(self, dependencies, owner, rank):
        later = (rank + 1) % self.ranks
        return later if later != owner and dependencies.needs(owner, later) else owner

    def result_source(self, owner, rank):
        earlier = (rank - 1) % self.ranks
        return earlier if earlier != owner else None


def test_verify_rejects_results_that_another_helper_would_merge():
    """Rank 1 would merge the results for the queries of rank 7 into its own: outputs were wrong by 1.3."""
    plan = make_plan(Mask.causal(), "contiguous", "distflash", 8)
    chained = make_pass_plan(plan.call, "kv", Chained(8, 1, 1, 1.0), helpers=EarlyRanks(8))
    wrong = verify(replace(plan, forward=chained))
    assert "forward: rank 1 receives out7 of rank 0, but merges only results for its own queries" in wrong[0]
    assert "`result_target` must return the owner in a forward pass" in wrong[0]


def test_helpers_that_cannot_be_planned_raise():
    call = make_plan(Mask.full(), "contiguous", "distflash", 4).call
    with pytest.raises(StrategyError, match="from their owners"):
        make_pass_plan(call, "kv", RingRoute(4), helpers=EarlyRanks(4))
    both = make_pass_plan(call, "kv", DirectRoute(4, 1, 1, 1.0), helpers=BothWays(4))
    with pytest.raises(StrategyError, match="would compute with K and V and with queries"):
        both.steps_of(0)
