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
from burst_portable.strategies.options import (
    BLOCKS_PER_LAUNCH,
    GRADIENT_COMM_DTYPE,
    PREFETCH_STEPS,
    TRANSFER,
    GradientCommDtype,
    Transfer,
    option,
)


@dataclass(frozen=True)
class BurstStrategy(Strategy):
    """K and V travel forward, Q, dO, LSE, delta and dQ backward."""

    name = "burst"
    title = "K and V go round; backward, Q, dO, LSE and delta, and dQ after them"
    suggested = ("burst", "burst+fetch")

    transfer: Transfer = option(TRANSFER)
    prefetch_steps: int = option(PREFETCH_STEPS)
    blocks_per_launch: int = option(BLOCKS_PER_LAUNCH)
    gradient_comm_dtype: GradientCommDtype = option(GRADIENT_COMM_DTYPE)

    def plan(self, call: AttentionCall) -> Plan:
        path = route(call.ranks, self.transfer, self.prefetch_steps, self.blocks_per_launch)
        return ring_plan(call, self.name, side="q", path=path, narrow=travel_narrow(call, self.gradient_comm_dtype))

    @classmethod
    def candidates(cls, call: AttentionCall, machine: Machine) -> Iterator[tuple[str, Strategy]]:
        yield "burst", cls()
        yield "burst+fetch", cls("direct")
        if machine.can_hold_all(call):
            n = call.ranks
            yield "burst+fetch, all ahead", cls("direct", prefetch_steps=n)
            yield "burst+fetch, all together", cls("direct", prefetch_steps=n, blocks_per_launch=n)

    @classmethod
    def trials(cls) -> Mapping[str, Strategy]:
        return {
            "burst": cls(),
            "burst+fetch": cls("direct"),
            "burst+together": cls("direct", prefetch_steps=64, blocks_per_launch=64),
        }
