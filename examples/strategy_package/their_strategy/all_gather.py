"""All-gather of K and V (Llama 3, arXiv 2407.21783, section 3.3.2): one launch over all keys that a rank sees.

::

    forward                                  backward
    K, V <- all K, V that q sees             K, V <- all K, V that q sees
    out, LSE <- attend(q, K, V)              dq, dK, dV <- attend_backward(q, K, V, dO, LSE)
                                             send each part of dK, dV to its owner, who adds it up

A rank receives only the rows that its queries see, and sends back only their gradients. It holds all of them at once:
more memory than a ring, and nothing to hide messages behind, but one launch and no merge.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from burst_portable.planning.call import AttentionCall
from burst_portable.planning.plans import Plan
from burst_portable.planning.routes import BlockDependencies
from burst_portable.strategies.base import Machine, Strategy, ring_plan, should_round_gradients
from burst_portable.strategies.options import GRADIENT_COMM_DTYPE, GradientCommDtype, option


@dataclass(frozen=True)
class Gather:
    """The route: every block leaves its owner at step 0 and is computed with at step 1, as the local block is."""

    ranks: int
    name: str = "all_gather"
    description: str = "all at once from their owners"
    trims: bool = True
    local_first_share: float = 0.0

    def step(self, owner: int, rank: int) -> int:
        return 1

    def block_source(self, dependencies: BlockDependencies, owner: int, rank: int) -> tuple[int, int] | None:
        return (owner, 0) if dependencies.needs(owner, rank) else None

    def targets(self, owner: int, rank: int) -> Iterator[int]:
        if owner == rank:
            yield from ((rank + distance) % self.ranks for distance in range(1, self.ranks))

    def gradient_target(self, dependencies: BlockDependencies, owner: int, rank: int) -> int:
        return owner

    def gradient_source(self, owner: int, rank: int) -> int | None:
        return None

    def gradient_delay_steps(self, source: int, target: int) -> int:
        return 1


@dataclass(frozen=True)
class AllGatherStrategy(Strategy):
    """K and V are gathered in both passes; dK and dV are reduced at their owners."""

    name = "all_gather"
    title = "every rank gets all K and V that its queries see, for one launch; backward, dK and dV go home"

    gradient_comm_dtype: GradientCommDtype = option(GRADIENT_COMM_DTYPE)

    def plan(self, call: AttentionCall) -> Plan:
        rounds_gradients = should_round_gradients(call, self.gradient_comm_dtype)
        return ring_plan(call, self.name, side="kv", route=Gather(call.ranks), rounds_gradients=rounds_gradients)

    @classmethod
    def candidates(cls, call: AttentionCall, machine: Machine) -> Iterator[tuple[str, Strategy]]:
        if machine.can_hold_all(call):
            yield "all_gather", cls()
