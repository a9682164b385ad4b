"""Compare counted bytes with planned bytes, by rank, and print the table."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from burst_portable.planning.cost import rank_cost
from burst_portable.planning.hardware import HardwareSpec
from burst_portable.planning.messages import exchanges
from burst_portable.planning.plans import PassName, Plan

SHARE = 0.01
"""What counters may differ from a plan by."""
A_MESSAGE = 4096
"""And bytes for each message: its flag, the word that its receiver has room, a last packet that is not full."""
ONCE = 64 << 10
"""And bytes however many calls there are: each of some twenty links counts whole KiB, at both readings."""

Ways = tuple[int, int]
"""Bytes that one rank's device sent, and received."""


@dataclass(frozen=True)
class Planned:
    """Bytes of a rank in one call of a pass; and its messages, words to and from all others about room among them."""

    sent: int
    received: int
    messages: int


def planned(plan: Plan, pass_name: PassName, rank: int) -> Planned:
    """Return one rank's bytes and messages in a plan."""
    cost = rank_cost(plan, pass_name, rank, HardwareSpec(1.0, 1.0))
    steps = plan.steps(pass_name, rank)
    messages = sum(len((*s.sends, *s.receives, *s.result_sends, *s.result_receives)) for s in steps)
    if plan.heads:  # one message there, one a tensor back, to and from every other rank that shares heads
        messages += sum(2 * (plan.head_parallel_size - 1) * (1 + len(back)) for _, back in exchanges(plan, pass_name))
    return Planned(cost.sent, cost.received, messages + 2 * (plan.call.ranks - 1))


def unexplained(counted: int, plan: int, messages: int, calls: int) -> int:
    """Return the bytes by which a counter differs from the plan beyond flags and rounding; 0 if these explain all.

    Args:
        counted: of all calls, one way.
        plan: of one call, the same way.
        messages: of one call.
    """
    allowed = calls * (SHARE * plan + A_MESSAGE * messages) + ONCE
    return max(0, round(abs(counted - calls * plan) - allowed))


@dataclass
class Measured:
    """One strategy over one transport, in one pass: what was counted in all calls, and the plan of one, by rank."""

    row: str
    strategy: str
    transport: str
    which: str = ""
    calls: int = 0
    counted: list[Ways] = field(default_factory=list)
    plan: list[Planned] = field(default_factory=list)
    reason: str = ""  # why there is nothing

    def ways(self) -> Iterable[tuple[int, str, int, int, int]]:
        """Yield (rank, direction, bytes counted in all calls, bytes planned for one, messages)."""
        for rank, ((sent, received), one) in enumerate(zip(self.counted, self.plan, strict=True)):
            yield rank, "sent", sent, one.sent, one.messages
            yield rank, "received", received, one.received, one.messages

    def unexplained(self) -> dict[str, int]:
        """Return unexplained bytes of all calls by "rank 0, sent", without zeros."""
        found = {f"rank {r}, {way}": unexplained(*numbers, self.calls) for r, way, *numbers in self.ways()}
        return {where: over for where, over in found.items() if over}


def table(results: Sequence[Measured]) -> list[str]:
    """Return a line per rank: bytes per call, counted and planned."""
    lines = []
    for one in results:
        title = f"-- {one.row}, {one.strategy} over {one.transport}"
        if one.reason:
            lines.append(f"{title}: {one.reason[:120]}")
            continue
        lines.append(f"{title}, {one.which}: bytes a call, of {one.calls}")
        way = f"{{:>13}} {'by the plan':>13} {'ratio':>7}"
        lines.append(f"rank {way.format('sent')} {way.format('received')}")
        both = [
            f"{counted / one.calls:13,.0f} {plan:13,} {_ratio(counted, one.calls * plan):>7}"
            for _, _, counted, plan, _ in one.ways()
        ]
        lines += [f"{rank:4} {both[2 * rank]} {both[2 * rank + 1]}" for rank in range(len(one.counted))]
    return lines


def summary(results: Sequence[Measured], idle: Sequence[Ways], idle_seconds: float) -> list[str]:
    """Return the range of ratios by transport and pass, and the bytes that were not planned or are unexplained."""
    most = max((bytes_ for ways in idle for bytes_ in ways), default=0)
    lines = [f"idle for {idle_seconds:g} s: at most {most:,} bytes of a rank, one way"]
    for transport, which in dict.fromkeys((r.transport, r.which) for r in results if not r.reason):
        here = [one for one in results if (one.transport, one.which) == (transport, which) and not one.reason]
        ratios = [c / (one.calls * p) for one in here for _, _, c, p, _ in one.ways() if p]
        beside = [c / one.calls for one in here for _, _, c, p, _ in one.ways() if not p]
        line = f"{transport}, {which}:"
        if ratios:
            line += f" counted over planned {min(ratios):.4f} to {max(ratios):.4f}"
        if beside:
            line += f"; where nothing is planned, at most {max(beside):,.0f} bytes a call"
        lines.append(line)
    for one in results:
        for where, over in one.unexplained().items():
            name = f"{one.row}, {one.strategy} over {one.transport}, {one.which}"
            lines.append(f"not explained by flags and rounding: {name}, {where}: {over / one.calls:,.0f} bytes a call")
    return lines


def _ratio(counted: int, plan: int) -> str:
    return f"{counted / plan:.4f}" if plan else "-"
