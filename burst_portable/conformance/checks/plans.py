"""Check the plan of a tested strategy, before ranks run it: it must be correct, and depend on the call alone."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import fields, replace

from burst_portable.conformance.cases import Case
from burst_portable.conformance.running import plan_of
from burst_portable.errors import InputError, UnsupportedError
from burst_portable.mask import Mask
from burst_portable.planning.call import AttentionCall
from burst_portable.planning.plans import PASSES, PassPlan, Plan
from burst_portable.planning.schedule import Steps
from burst_portable.planning.verify import verify
from burst_portable.strategies.base import Strategy

PLAN_ERROR = "its plan is wrong"


def find_plan_error(case: Case, device: str) -> str:
    """Return what is wrong with the plan of a case; "" for a correct one."""
    if wrong := verify(plan_of(case, device)):
        return f"{PLAN_ERROR} (`burst-portable plan` shows it): {'; '.join(wrong[:3])}"
    return find_impurity(case.make_strategy(), case.make_call(device))


def find_impurity(strategy: Strategy, call: AttentionCall) -> str:
    """Return how plans of one call differ: a second one, and one by an equal strategy; "" if they are equal.

    Plans of other calls are made in between, since ranks do not make the same calls before this one.
    """
    first = strategy.plan(call)
    steps = [_steps(part) for _, part in first.passes()]
    mask = Mask.full() if call.mask == Mask.causal() else Mask.causal()
    for other in (replace(call, mask=mask), replace(call, mask=mask, batch=call.batch + 1)):
        with suppress(UnsupportedError, InputError):
            strategy.plan(other)
    for again in (strategy.plan(call), replace(strategy).plan(call)):
        if found := _difference(first, again):
            return (
                f"its `plan` is not pure: plans of equal calls differ in {found}; derive them from the call and the "
                "options alone, and make routes and helpers frozen dataclasses"
            )
        for (name, part), made in zip(again.passes(), steps, strict=True):
            if ranks := [rank for rank, (a, b) in enumerate(zip(made, _steps(part), strict=True)) if a != b]:
                return (
                    f"its plan is not pure: an equal {name} pass has other steps on rank {ranks[0]}; the methods of "
                    "its route and helpers must depend on their arguments alone"
                )
    return ""


def _difference(one: Plan, other: Plan) -> str:
    """Return the first field in which two plans differ, such as "forward.route"; "" if they are equal."""
    for field in fields(Plan):
        if getattr(one, field.name) != getattr(other, field.name):
            if field.name not in PASSES:
                return field.name
            a, b = getattr(one, field.name), getattr(other, field.name)
            parts = (f.name for f in fields(PassPlan) if f.compare)
            return f"{field.name}.{next(part for part in parts if getattr(a, part) != getattr(b, part))}"
    return ""


def _steps(pass_plan: PassPlan) -> list[Steps]:
    """Return the steps of all ranks, without those that the pass has cached."""
    fresh = replace(pass_plan)
    return [fresh.steps_of(rank) for rank in range(fresh.call.ranks)]
