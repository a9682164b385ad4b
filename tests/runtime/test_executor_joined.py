"""Test launches that compute the local block together with received blocks, against attention in float64."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch

import burst_portable as bp
from burst_portable.conformance.cases import Case
from burst_portable.conformance.oracle import find_violations
from burst_portable.planning.messages import inboxes
from burst_portable.planning.plans import Plan
from burst_portable.planning.routes import DirectRoute, Side
from burst_portable.planning.verify import verify
from burst_portable.strategies.all_gather import GatherRoute
from burst_portable.strategies.base import Strategy, ring_plan
from tests.support.attention_cases import expected, make_inputs, on_one_rank
from tests.support.thread_peers import World, run_peers


@dataclass(frozen=True)
class Joined(Strategy):
    """Gather K and V in forward, and K and V or queries in backward."""

    name = "joined"
    title = "all blocks in one launch"

    side: Side = "kv"
    rounds_gradients: bool = False

    def plan(self, call):
        return ring_plan(
            call, self.name, side=self.side, route=GatherRoute(call.ranks), rounds_gradients=self.rounds_gradients
        )


@dataclass(frozen=True)
class JoinedForward(Strategy):
    """Gather K and V in forward, and send one block after the other in backward."""

    name = "joined_forward"
    title = "other routes forward than backward"

    def plan(self, call):
        gather, one = GatherRoute(call.ranks), DirectRoute(call.ranks, 1, 1, 1.0)
        return ring_plan(call, self.name, side="kv", route=gather, backward_route=one)


@dataclass(frozen=True)
class JoinedCase(Case):
    chosen: Strategy = Joined()  # a field of a frozen dataclass

    def make_strategy(self):
        return self.chosen


def launches(plan: Plan) -> set[tuple[int, ...]]:
    steps = [step for _, part in plan.passes() for rank in range(plan.call.ranks) for step in part.steps_of(rank)]
    return {len(step.compute.blocks) for step in steps if step.compute}


@pytest.mark.parametrize("side", ["kv", "q"])
@pytest.mark.parametrize("layout", ["zigzag", "contiguous", "striped"])
@pytest.mark.parametrize("mask", ["full", "causal", "window", "documents", "custom"])
def test_joined_launch_matches_float64(mask, layout, side):
    for ranks in (1, 2, 4):
        case = JoinedCase(mask, layout, ranks=ranks, dtype=torch.float64, chosen=Joined(side))
        plan = case.make_strategy().plan(case.make_call())
        assert verify(plan) == []
        if mask == "full":
            assert launches(plan) == {ranks}
        x = make_inputs(case)
        for answer in bp.run_threads(ranks, lambda mesh, c=case, x=x: on_one_rank(mesh, c, x)):
            assert find_violations(answer, *expected(case, x), case.dtype) == {}


@pytest.mark.parametrize("kernel", ["reference", "auto"])
def test_joined_launch_supports_input_dtype_gradients(kernel):
    case = JoinedCase("causal", ranks=3, dtype=torch.bfloat16, sinks=True, chosen=Joined(rounds_gradients=True))
    x = make_inputs(case)
    answers = bp.run_threads(3, lambda mesh: on_one_rank(mesh, case, x, kernel))
    wrong = find_violations(answers[0], *expected(case, x), case.dtype)
    assert set(wrong) <= {"dk", "dv"}  # rounded before they are sent to the owner rank
    wide = replace(case, chosen=Joined())
    answers = bp.run_threads(3, lambda mesh: on_one_rank(mesh, wide, x, kernel))
    assert find_violations(answers[0], *expected(wide, x), wide.dtype) == {}


@pytest.mark.parametrize("side", ["kv", "q"])
def test_joined_launch_has_own_inbox_offset(side):
    """Other ranks write before and after it, and passes of different sizes follow each other."""
    cases = [JoinedCase(mask, ranks=4, chosen=Joined(side)) for mask in ("full", "documents", "window", "full")]

    def work(mesh):
        return [on_one_rank(mesh, case, make_inputs(case)) for case in cases]

    for case, *answers in zip(cases, *run_peers(World(4, delay=0.002), work), strict=True):
        assert all(find_violations(answer, *expected(case, make_inputs(case)), case.dtype) == {} for answer in answers)


def test_equal_moves_of_both_passes_have_two_offsets():
    """Block 2 reaches rank 3 at step 0 in both passes: behind blocks 0 and 1 in one inbox, and first in the other."""
    case = JoinedCase("full", ranks=4, dtype=torch.float64, chosen=JoinedForward())
    plan, x = case.make_strategy().plan(case.make_call()), make_inputs(case)
    assert verify(plan) == []
    assert plan.direct
    (forward,), (backward,) = inboxes(plan, 3).offsets.values()
    assert any(forward[move] != backward[move] for move in forward.keys() & backward.keys())
    for answer in run_peers(World(4, delay=0.002), lambda mesh: on_one_rank(mesh, case, x)):
        assert find_violations(answer, *expected(case, x), case.dtype) == {}
