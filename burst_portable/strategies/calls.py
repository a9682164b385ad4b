"""Check what strategies return: they may be another package's, and their mistakes are told in one line."""

from __future__ import annotations

from collections.abc import Iterable

from burst_portable.errors import UnsupportedError, shown
from burst_portable.planning.call import AttentionCall
from burst_portable.planning.plans import Plan
from burst_portable.strategies.base import Strategy


def checked_plan(strategy: Strategy, call: AttentionCall) -> Plan:
    """Return the strategy's plan for a call.

    Raises as `Strategy.plan`, and `UnsupportedError` for what is no plan, or a plan that has another strategy's name.
    """
    plan = strategy.plan(call)
    what = f"the strategy {strategy.name!r} is broken"
    if not isinstance(plan, Plan):
        raise UnsupportedError(f"{what}: its `plan` returned no Plan", got=shown(plan))
    if plan.strategy != strategy.name and strategy.name != "auto":
        raise UnsupportedError(
            f"{what}: its plan has another name", got=shown(plan.strategy), next_step="pass `self.name` to the plan"
        )
    return plan


def by_label(strategy: type[Strategy], found: Iterable[tuple[str, Strategy]], what: str) -> dict[str, Strategy]:
    """Return what a strategy's `candidates` or `trials` name, by label.

    Raises `UnsupportedError` for a label that may be another strategy's, and for what is no strategy. `what`: a
    "candidate" or a "trial".
    """
    named = {}
    for label, one in found:
        name = strategy.name
        own = isinstance(label, str) and (label == name or label.startswith((f"{name}+", f"{name},", f"{name} ")))
        if not own:
            raise UnsupportedError(
                f"a {what} of the strategy {name!r} has a label that is not its own",
                got=shown(label),
                allowed=f"{name!r}, or {name!r} with '+', ',' or ' ' and words after it",
            )
        if not isinstance(one, Strategy):
            raise UnsupportedError(f"the {what} {label!r} is no Strategy", got=shown(one))
        named[label] = one
    return named
