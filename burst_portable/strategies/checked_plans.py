"""Make the plan of a strategy and check it: `checked_plan`, and `verified_plan` for those of other packages."""

from __future__ import annotations

from dataclasses import fields, replace

from burst_portable.errors import StrategyError, shown
from burst_portable.planning.call import AttentionCall, Dropout
from burst_portable.planning.plans import Plan
from burst_portable.planning.verify import verify
from burst_portable.strategies.base import Strategy
from burst_portable.strategies.registry import OURS

_VERIFIED = 32  # ranks whose parts of another package's plan are verified before it may run
_OF_PASSES = ("heads", "kv_heads", "layout", "kv_layout")
"""Fields in which the calls of passes may differ from the call: after a head-parallel exchange, for example."""


def checked_plan(strategy: Strategy, call: AttentionCall) -> Plan:
    """Return the strategy's plan for a call.

    Raises:
        UnsupportedError: The strategy cannot serve the call.
        StrategyError: It returns no plan, or one of another call or name. The call of a strategy that is not `exact`
            has the mask that it `computes`.
        InputError: See `Strategy.plan`.
    """
    plan = strategy.plan(call)
    what = f"the strategy {strategy.name!r} is broken"
    if not isinstance(plan, Plan):
        raise StrategyError(f"{what}: its `plan` returned no Plan", got=shown(plan))
    if plan.strategy != strategy.name and strategy.name != "auto":
        raise StrategyError(
            f"{what}: its plan has another name", got=shown(plan.strategy), next_step="pass `self.name` to the plan"
        )
    if not strategy.exact:
        call = replace(call, mask=strategy.computes(call.mask))
    for name, made, free in (
        ("its plan", plan.call, ()),
        ("its forward pass", plan.forward.call, _OF_PASSES),
        ("its backward pass", plan.backward.call, _OF_PASSES),
    ):
        for field in fields(call):
            got, asked = (_compared(one, field.name) for one in (made, call))
            if field.name not in free and got != asked:
                allowed = f"{_text(asked)}, the {field.name} of the call"
                raise StrategyError(f"{what}: {name} has another {field.name}", got=shown(_text(got)), allowed=allowed)
    return plan if strategy.name == "auto" else replace(plan, label=strategy.label)


def _compared(call: AttentionCall, name: str) -> object:
    """Return a field of a call, without the parts of its dropout that differ between passes and calls."""
    value: object = getattr(call, name)
    return value.p if isinstance(value, Dropout) else value


def _text(value: object) -> str:
    """Return the name of a mask or a layout, or the text of another value."""
    return str(getattr(value, "name", value))


def verified_plan(strategy: Strategy, call: AttentionCall) -> Plan:
    """Return `checked_plan`. That of another package's strategy is also verified, and made again.

    Otherwise ranks would wait for messages that no rank sends, or compute wrong numbers. Of many ranks, the first
    `_VERIFIED` are verified. Plans that differ only between processes look alike here; ranks compare them before they
    run.

    Raises:
        UnsupportedError: As `checked_plan`.
        StrategyError: As `checked_plan`, or the plan is wrong, or another one than before.
    """
    plan, what = checked_plan(strategy, call), f"the strategy {strategy.name!r} is broken"
    if strategy.name not in OURS:
        few = None if call.ranks <= _VERIFIED else range(_VERIFIED)
        if wrong := verify(plan, ranks=few):
            next_step = f"burst-portable plan --strategy {strategy.name} shows all"
            raise StrategyError(f"{what}: its plan is wrong: {wrong[0]}", next_step=next_step)
        if checked_plan(strategy, call) != plan:
            next_step = f"burst-portable conform --strategy {strategy.name} shows where"
            raise StrategyError(f"{what}: two plans of this call differ, so ranks would", next_step=next_step)
    return plan
