"""RingAttention (arXiv 2310.01889): K and V go round, and in the backward pass dK and dV with them.

::

    forward                                  backward
    for each step:                           for each step:
        send K, V on; receive the next           send K, V on; receive the next
        out, LSE <- merge(attend(q, K, V))       dq += ...; dK, dV += ...
                                                 send dK, dV after their block; at last home
"""

from __future__ import annotations

from dataclasses import dataclass

from burst_portable.planning.call import AttentionCall
from burst_portable.planning.plans import Plan
from burst_portable.planning.routes import Own
from burst_portable.strategies.base import (
    GradientWidth,
    Moves,
    check_fetched,
    check_gradients,
    check_moves,
    check_own,
    ring_plan,
    route,
    share_before,
    travel_narrow,
)


@dataclass(frozen=True)
class RingStrategy:
    """K and V travel in both passes."""

    moves: Moves = "neighbour"
    ahead: int = 1  # steps before it is needed that a block is fetched
    together: int = 1  # fetched blocks per launch
    own: Own = "first"  # when backward computes with the own block: first hides the block that comes, last gradients
    gradients: GradientWidth = "wide"
    name: str = "ring"

    def __post_init__(self) -> None:
        check_moves(self.moves)
        check_fetched(self.moves, self.ahead, self.together)
        check_own(self.moves, self.own)
        check_gradients(self.gradients)

    def plan(self, call: AttentionCall) -> Plan:
        narrow = travel_narrow(call, self.gradients)
        fetched, before = (
            {"ahead": self.ahead, "together": self.together},
            share_before(call, self.own, "kv", narrow=narrow),
        )
        path = route(call.ranks, self.moves, **fetched)
        back = route(call.ranks, self.moves, **fetched, before=before)
        return ring_plan(call, self.name, side="kv", path=path, back=back, narrow=narrow)
