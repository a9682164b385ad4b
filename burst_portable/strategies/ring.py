"""RingAttention (arXiv 2310.01889): K and V go round, and in the backward pass dK and dV with them.

::

    forward                                  backward
    for each step:                           for each step:
        send K, V on; receive the next           send K, V on; receive the next
        out, LSE <- merge(attend(q, K, V))       dq += ...; dK, dV += ...
                                                 send dK, dV after their block; at last home
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from burst_portable.planning.call import AttentionCall
from burst_portable.planning.plans import Plan
from burst_portable.planning.routes import Own
from burst_portable.strategies.base import Machine, Strategy, ring_plan, route, share_before, travel_narrow
from burst_portable.strategies.options import AHEAD, GRADIENTS, MOVES, OWN, TOGETHER, GradientWidth, Moves, option


@dataclass(frozen=True)
class RingStrategy(Strategy):
    """K and V travel in both passes."""

    name = "ring"
    title = "K and V go round; backward, dK and dV after them"
    suggested = ("ring", "ring+fetch")

    moves: Moves = option(MOVES)
    ahead: int = option(AHEAD)
    together: int = option(TOGETHER)
    own: Own = option(OWN)
    gradients: GradientWidth = option(GRADIENTS)

    def plan(self, call: AttentionCall) -> Plan:
        narrow = travel_narrow(call, self.gradients)
        before = share_before(call, self.own, "kv", narrow=narrow)
        path = route(call.ranks, self.moves, self.ahead, self.together)
        back = route(call.ranks, self.moves, self.ahead, self.together, before)
        return ring_plan(call, self.name, side="kv", path=path, back=back, narrow=narrow)

    @classmethod
    def candidates(cls, call: AttentionCall, machine: Machine) -> Iterator[tuple[str, Strategy]]:
        yield "ring", cls()
        yield "ring+fetch", cls(moves="fetch")
        yield "ring+fetch, own last", cls(moves="fetch", own="last")
        if machine.can_hold_all(call):
            n = call.ranks
            yield "ring+fetch, all ahead", cls("fetch", ahead=n)
            yield "ring+fetch, all ahead, own last", cls("fetch", ahead=n, own="last")
            yield "ring+fetch, all together", cls("fetch", ahead=n, together=n)
            yield "ring+fetch, all together, own last", cls("fetch", ahead=n, together=n, own="last")
            yield "ring+fetch, all together, own divided", cls("fetch", ahead=n, together=n, own="divided")

    @classmethod
    def trials(cls) -> Mapping[str, Strategy]:
        return {
            "ring": cls(),
            "ring+fetch": cls("fetch"),
            "ring+ahead": cls("fetch", ahead=64),
            "ring+together": cls("fetch", together=2),
            "ring+last": cls("fetch", ahead=64, own="last"),
            "ring+divided": cls("fetch", ahead=64, together=64, own="divided"),
        }
