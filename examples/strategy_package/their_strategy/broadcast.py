"""Broadcast of K and V: one rank after the other sends its block to all ranks that need it.

::

    forward, step t                          backward, step t
    rank t: send k, v to all                 rank t: send k, v to all
    K, V <- the block of rank t - 1          K, V <- the block of rank t - 1
    out, LSE <- merge(attend(q, K, V))       dq, dK, dV <- attend_backward(q, K, V, dO, LSE)
                                             send dK, dV to rank t - 1, which adds them to its own

A rank receives only the rows that its queries see, while it computes with the block before. It holds two blocks, and
sends as many bytes as in a ring. But at each step only one rank sends, to all ranks at once. Its link is the
bottleneck, and all other links are idle. A ring uses every link at every step, so it is faster on equal links. This is
the simplest schedule of steps that is correct for every mask, layout and number of ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from burst_portable.planning.call import AttentionCall
from burst_portable.planning.plans import Plan
from burst_portable.planning.routes import BlockDependencies
from burst_portable.strategies.base import Strategy, ring_plan, should_round_gradients
from burst_portable.strategies.options import GRADIENT_COMM_DTYPE, GradientCommDtype, option


@dataclass(frozen=True)
class BroadcastRoute:
    """Rank t sends its block at step t. All ranks, rank t too, compute with it at step t + 1."""

    ranks: int
    name: str = "broadcast"
    description: str = "from one owner after the other"
    trims: bool = True  # no rank forwards a block, so each receives only the rows that it needs
    local_first_share: float = 0.0  # no part of the local block is computed before its step

    def step(self, owner: int, rank: int) -> int:
        return owner + 1

    def block_source(self, dependencies: BlockDependencies, owner: int, rank: int) -> tuple[int, int] | None:
        return (owner, owner) if dependencies.needs(owner, rank) else None

    def targets(self, owner: int, rank: int) -> Iterator[int]:
        if owner == rank:
            yield from (target for target in range(self.ranks) if target != owner)

    def result_target(self, dependencies: BlockDependencies, owner: int, rank: int) -> int:
        return owner

    def result_source(self, owner: int, rank: int) -> int | None:
        return None  # no rank forwards gradients

    def result_delay_steps(self, source: int, target: int) -> int:
        return 1


@dataclass(frozen=True)
class BroadcastStrategy(Strategy):
    """Broadcast K and V in both passes, and send dK and dV back to their owners."""

    name = "broadcast"
    title = "each rank in turn sends K and V to all ranks that need them; backward, dK and dV return to it"

    gradient_comm_dtype: GradientCommDtype = option(GRADIENT_COMM_DTYPE)

    def plan(self, call: AttentionCall) -> Plan:
        rounds_gradients = should_round_gradients(call, self.gradient_comm_dtype)
        route = BroadcastRoute(call.ranks)
        return ring_plan(call, self.name, side="kv", route=route, rounds_gradients=rounds_gradients)
