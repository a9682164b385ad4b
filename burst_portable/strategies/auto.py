"""Chooses a strategy by the predicted time of its plan, and says why.

Which side should travel is arithmetic: per token, K and V with their float32 gradients are 12·Hkv·D bytes in 16
bits, Q with dO, LSE, delta and float32 dQ 8·Hq·D + 8·Hq. So burst's backward wins while Hq/Hkv is below about 1.5,
and the ring's above; windows and documents favour fetching only what is needed; Ulysses wins where heads allow it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

from burst_portable.cost import PlanCost, Rates, plan_cost
from burst_portable.errors import InputError, UnsupportedError, explain, shown
from burst_portable.plans import Plan, Problem
from burst_portable.strategies.base import Strategy, Traits, check_inner
from burst_portable.strategies.burst import BurstStrategy
from burst_portable.strategies.double_ring import DoubleRingStrategy
from burst_portable.strategies.ring import RingStrategy
from burst_portable.strategies.ulysses import UlyssesStrategy, possible_groups

DEFAULT_RATES = Rates(tflops=400.0, gbps=100.0)
"""A present-day accelerator, used where no backend says better."""

_AT_ONCE = 16  # ranks whose blocks may all be held at once
_SAMPLED_RANKS = 4  # above so many ranks, the costs of so many, spread over all: every rank's would be ranks² tiles


@dataclass(frozen=True)
class AutoStrategy:
    """The cheapest of all; `inner` (ranks a node) lets the double ring take part, and prices what leaves a node."""

    inner: int | None = None
    rates: Rates = DEFAULT_RATES
    name: str = "auto"
    traits: ClassVar[Traits] = Traits()

    def __post_init__(self) -> None:
        check_inner(self.inner)
        if not isinstance(self.rates, Rates):
            raise InputError(explain("rates are none", got=shown(self.rates), allowed="burst_portable.cost.Rates"))

    def plan(self, problem: Problem) -> Plan:
        rates = self.rates if self.inner is None else replace(self.rates, node=self.inner)
        costs: dict[str, tuple[PlanCost, Plan]] = {}
        reasons = []
        for label, strategy in self._candidates(problem):
            try:
                plan = strategy.plan(problem)
            except UnsupportedError as error:
                reasons.append(f"not {label}: {error}")
                continue
            costs[label] = plan_cost(plan, rates, _sample(problem.ranks)), plan
        best = min(costs, key=lambda label: (round(costs[label][0].seconds, 7), costs[label][0].sent))
        ranking = sorted(costs, key=lambda label: costs[label][0].seconds)
        told = ", ".join(f"{label} {_told(costs[label][0].seconds)}" for label in ranking)
        source = f" at rates of {rates.source}" if rates.source else ""
        if 0 < rates.node < problem.ranks:
            source += f", {rates.outer_gbps:g} GB/s between nodes of {rates.node}"
        reason = f"chose {best} by predicted time{source} ({told})" + "".join(f"; {r}" for r in reasons)
        return replace(costs[best][1], reason=reason)

    def _candidates(self, problem: Problem) -> Iterator[tuple[str, Strategy]]:
        ranks = problem.ranks
        yield "ring", RingStrategy()
        yield "burst", BurstStrategy()
        yield "ring+fetch", RingStrategy(moves="fetch")
        yield "ring+fetch, own last", RingStrategy(moves="fetch", own="last")
        yield "burst+fetch", BurstStrategy(moves="fetch")
        yield "ulysses", UlyssesStrategy()
        # Where it was measured what messages from several ranks take at once; not for many ranks, whose blocks fill
        # the memory.
        if (self.rates.direct or self.rates.spread) and ranks <= _AT_ONCE:
            yield "ring+fetch, all ahead", RingStrategy(moves="fetch", ahead=ranks)
            yield "burst+fetch, all ahead", BurstStrategy(moves="fetch", ahead=ranks)
            yield "ring+fetch, all ahead, own last", RingStrategy(moves="fetch", ahead=ranks, own="last")
            together = RingStrategy(moves="fetch", ahead=ranks, together=ranks)
            yield "ring+fetch, all together", together
            yield "ring+fetch, all together, own last", replace(together, own="last")
            yield "burst+fetch, all together", BurstStrategy(moves="fetch", ahead=ranks, together=ranks)
        if self.rates.direct:  # copies that need no multiprocessors go on beside a kernel
            for groups in possible_groups(problem):
                yield f"ulysses, {groups} groups", UlyssesStrategy(groups=groups)
        if self.inner is not None and self.inner > 1:
            yield "double_ring", DoubleRingStrategy(inner=self.inner)
            yield "double_ring+kv", DoubleRingStrategy(inner=self.inner, travels="kv")


def _told(seconds: float) -> str:
    """A time of three digits."""
    return (
        f"{seconds * 1e3:.3g} ms"
        if seconds < 0.9995
        else f"{seconds:.3g} s"
        if seconds < 999.5
        else f"{seconds:,.0f} s"
    )


def _sample(ranks: int) -> tuple[int, ...]:
    if ranks <= _SAMPLED_RANKS:
        return tuple(range(ranks))
    return tuple(sorted({i * (ranks - 1) // (_SAMPLED_RANKS - 1) for i in range(_SAMPLED_RANKS)}))
