"""BurstAttention (arXiv 2403.09347, section 3.1): forward as the ring; backward K, V, dK, dV stay where they are.

::

    forward                                  backward
    for each step:                           for each step:
        send K, V on; receive the next           send Q, dO, LSE, delta on; receive the next
        out, LSE <- merge(attend(q, K, V))       dk, dv += ...; dQ += ...
                                                 send dQ after its block; at last home

What travels backward no longer holds O: delta = rowsum(dO * O) takes its place. For as many K/V heads as query
heads these are fewer bytes than the ring's; for few K/V heads (GQA) they are more, see docs/strategies.md.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from burst_portable.planning.call import AttentionCall
from burst_portable.planning.plans import Plan
from burst_portable.strategies.base import Machine, Strategy, ring_plan, route, travel_narrow
from burst_portable.strategies.options import AHEAD, GRADIENTS, MOVES, TOGETHER, GradientWidth, Moves, option


@dataclass(frozen=True)
class BurstStrategy(Strategy):
    """K and V travel forward, Q, dO, LSE, delta and dQ backward."""

    name = "burst"
    title = "K and V go round; backward, Q, dO, LSE and delta, and dQ after them"
    suggested = ("burst", "burst+fetch")

    moves: Moves = option(MOVES)
    ahead: int = option(AHEAD)
    together: int = option(TOGETHER)
    gradients: GradientWidth = option(GRADIENTS)

    def plan(self, call: AttentionCall) -> Plan:
        path = route(call.ranks, self.moves, self.ahead, self.together)
        return ring_plan(call, self.name, side="q", path=path, narrow=travel_narrow(call, self.gradients))

    @classmethod
    def candidates(cls, call: AttentionCall, machine: Machine) -> Iterator[tuple[str, Strategy]]:
        yield "burst", cls()
        yield "burst+fetch", cls("fetch")
        if machine.can_hold_all(call):
            n = call.ranks
            yield "burst+fetch, all ahead", cls("fetch", ahead=n)
            yield "burst+fetch, all together", cls("fetch", ahead=n, together=n)

    @classmethod
    def trials(cls) -> Mapping[str, Strategy]:
        return {
            "burst": cls(),
            "burst+fetch": cls("fetch"),
            "burst+together": cls("fetch", ahead=64, together=64),
        }
