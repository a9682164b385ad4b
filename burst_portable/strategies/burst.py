"""BurstAttention (arXiv 2403.09347, section 3.1): forward as the ring; backward, Q circulates and dQ follows it.

::

    forward                                       backward
    for each step:                                for each step:
        send k, v; receive the next block             send q, dout, lse, delta; receive the next block
        out, lse = merge(attend(q, k, v))             dk, dv += ...; dq of block += ...
                                                      send dq after its block; at last to the block's owner

K, V, dK and dV stay on their ranks. delta = rowsum(dout * out) replaces out. If there are as many K/V heads as query
heads, these are fewer bytes than the ring's. With few K/V heads (GQA) they are more: see docs/strategies.md. `ring`
lists the files that run these loops.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from burst_portable.planning.call import AttentionCall
from burst_portable.planning.plans import Plan
from burst_portable.strategies.base import Machine, Strategy, make_route, ring_plan, should_round_gradients
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
    """Send K and V in the forward pass, Q, dO, LSE, delta and dQ in the backward pass."""

    name = "burst"
    title = "K and V circulate; backward, Q, dO, LSE and delta circulate, and dQ follows them"
    suggested = ("burst", "burst(transfer=direct)")

    transfer: Transfer = option(TRANSFER)
    prefetch_steps: int = option(PREFETCH_STEPS)
    blocks_per_launch: int = option(BLOCKS_PER_LAUNCH)
    gradient_comm_dtype: GradientCommDtype = option(GRADIENT_COMM_DTYPE)

    def plan(self, call: AttentionCall) -> Plan:
        route = make_route(call.ranks, self.transfer, self.prefetch_steps, self.blocks_per_launch)
        rounds_gradients = should_round_gradients(call, self.gradient_comm_dtype)
        return ring_plan(call, self.name, side="q", route=route, rounds_gradients=rounds_gradients)

    @classmethod
    def candidates(cls, call: AttentionCall, machine: Machine) -> Iterator[Strategy]:
        yield cls()
        yield cls("direct")
        if machine.can_hold_all(call):
            n = call.ranks
            yield cls("direct", prefetch_steps=n)
            yield cls("direct", prefetch_steps=n, blocks_per_launch=n)

    @classmethod
    def trials(cls) -> Iterator[Strategy]:
        yield cls()
        yield cls("direct")
        yield cls("direct", prefetch_steps=64, blocks_per_launch=64)
