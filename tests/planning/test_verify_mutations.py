"""Change correct plans at random. Run those that `verify` accepts, and compare them with attention in float64."""

from __future__ import annotations

import math
import random
from collections import Counter
from dataclasses import dataclass, replace

import pytest
import torch

import burst_portable as bp
from burst_portable.conformance.cases import AXES, STRATEGIES, Case
from burst_portable.conformance.oracle import Answer, find_violations
from burst_portable.errors import InputError, StrategyError, UnsupportedError
from burst_portable.planning.call import AttentionCall
from burst_portable.planning.plans import Plan
from burst_portable.planning.verify import verify
from burst_portable.strategies.base import Strategy
from burst_portable.strategies.checked_plans import checked_plan
from tests.support.attention_cases import Inputs, expected, make_inputs, on_one_rank
from tests.support.plan_mutations import Fixed, NotPossible, change_plan
from tests.support.thread_peers import World, run_peers

LABELS = [
    *(label for label in STRATEGIES if label != "auto"),
    "ring(transfer=direct, prefetch_steps=2, blocks_per_launch=2, local_block_order=last)",
    "burst(transfer=direct, prefetch_steps=2, blocks_per_launch=2)",
    "double_ring(ranks_per_node=2)",
    "usp(ranks_per_node=2)",
    "distflash(prefetch_steps=2)",
]


@dataclass(frozen=True)
class ChangedCase(Case):
    """A case whose plan was changed."""

    fixed: Strategy | None = None

    def make_strategy(self) -> Strategy:
        return super().make_strategy() if self.fixed is None else self.fixed


def draw_case(draw: random.Random, most_ranks: int) -> ChangedCase:
    while True:
        axes = {name: draw.choice(AXES[name]) for name in ("mask", "layout", "softcap", "sinks", "dropout")}
        sizes = {"heads": draw.choice(("mha", "gqa", "mqa", "wide_values")), "batch": draw.choice((1, 2))}
        ranks, length = draw.randint(1, most_ranks), draw.choice((31, 53))
        case = ChangedCase(
            strategy=draw.choice(LABELS), ranks=ranks, length=length, dtype=torch.float64, **axes, **sizes
        )
        if case.strategy.startswith(("usp", "ulysses")):  # with the kernel of these, rows keep their natural order
            case = replace(case, softcap=None, dropout=0.0, heads="gqa")
        if case.possible():
            return case


def errors_of(plan: Plan, call: AttentionCall) -> list[str]:
    """Return the errors that are found before ranks run the plan of another package's strategy."""
    try:
        return verify(checked_plan(Fixed(plan), call))
    except StrategyError as error:
        return [str(error)]


def results(case: ChangedCase, x: Inputs, plan: Plan) -> list[Answer]:
    """Return the results of all ranks over messages, and over peer copies if the plan allows them."""
    changed = replace(case, fixed=Fixed(plan))

    def work(mesh: bp.Mesh) -> Answer:
        return on_one_rank(mesh, changed, x, at_once=True)

    answers = bp.run_threads(case.ranks, work, timeout=10.0)
    if plan.direct and case.ranks > 1:
        answers += run_peers(World(case.ranks, timeout=10.0), work)
    return answers


@pytest.mark.parametrize(
    ("seed", "cases", "most_ranks"),
    [*((seed, 4, 5) for seed in range(8)), *(pytest.param(s, 60, 8, marks=pytest.mark.full) for s in range(100, 110))],
)
def test_changed_plan_is_rejected_or_right(seed, cases, most_ranks):
    draw, counts = random.Random(seed), Counter[str]()
    for _ in range(cases):
        case = draw_case(draw, most_ranks)
        call = replace(case.make_call("cpu"), scale=1 / math.sqrt(case.sizes[2]))
        plan, x = case.make_strategy().plan(call), make_inputs(case)
        exact = expected(case, x)
        for _ in range(12):
            try:
                kind, changed = change_plan(plan, draw)
            except (NotPossible, InputError, StrategyError, UnsupportedError):
                continue
            if errors_of(changed, call):
                counts["rejected"] += 1
                continue
            counts["accepted"] += 1
            try:
                answers = results(case, x, changed)
            except Exception as error:
                raise AssertionError(f"seed {seed}: {kind} of {case.spec()}: {changed}") from error
            for answer in answers:
                assert find_violations(answer, *exact, case.dtype) == {}, (kind, case.spec())
    assert min(counts["rejected"], counts["accepted"]) >= 2 * cases, counts
