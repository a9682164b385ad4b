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

from dataclasses import dataclass

from burst_portable.planning.call import AttentionCall
from burst_portable.planning.plans import Plan
from burst_portable.strategies.base import (
    GradientWidth,
    Moves,
    check_fetched,
    check_gradients,
    check_moves,
    ring_plan,
    route,
    travel_narrow,
)


@dataclass(frozen=True)
class BurstStrategy:
    """K and V travel forward, Q, dO, LSE, delta and dQ backward."""

    moves: Moves = "neighbour"
    ahead: int = 1  # steps before it is needed that a block is fetched
    together: int = 1  # fetched blocks per launch
    gradients: GradientWidth = "wide"
    name: str = "burst"

    def __post_init__(self) -> None:
        check_moves(self.moves)
        check_fetched(self.moves, self.ahead, self.together)
        check_gradients(self.gradients)

    def plan(self, call: AttentionCall) -> Plan:
        return ring_plan(
            call,
            self.name,
            side="q",
            path=route(call.ranks, self.moves, ahead=self.ahead, together=self.together),
            narrow=travel_narrow(call, self.gradients),
        )
