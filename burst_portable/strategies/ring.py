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
from functools import partial

from burst_portable.planning.call import AttentionCall
from burst_portable.planning.plans import Plan
from burst_portable.strategies.base import Machine, Strategy, ring_plan, route, share_before, travel_narrow
from burst_portable.strategies.options import (
    BLOCKS_PER_LAUNCH,
    GRADIENT_COMM_DTYPE,
    LOCAL_BLOCK_ORDER,
    PREFETCH_STEPS,
    TRANSFER,
    GradientCommDtype,
    LocalBlockOrder,
    Transfer,
    option,
)


@dataclass(frozen=True)
class RingStrategy(Strategy):
    """K and V travel in both passes."""

    name = "ring"
    title = "K and V go round; backward, dK and dV after them"
    suggested = ("ring", "ring+fetch")

    transfer: Transfer = option(TRANSFER)
    prefetch_steps: int = option(PREFETCH_STEPS)
    blocks_per_launch: int = option(BLOCKS_PER_LAUNCH)
    local_block_order: LocalBlockOrder = option(LOCAL_BLOCK_ORDER)
    gradient_comm_dtype: GradientCommDtype = option(GRADIENT_COMM_DTYPE)

    def plan(self, call: AttentionCall) -> Plan:
        narrow = travel_narrow(call, self.gradient_comm_dtype)
        before = share_before(call, self.local_block_order, "kv", narrow=narrow)
        path = route(call.ranks, self.transfer, self.prefetch_steps, self.blocks_per_launch)
        back = route(call.ranks, self.transfer, self.prefetch_steps, self.blocks_per_launch, before)
        return ring_plan(call, self.name, side="kv", path=path, back=back, narrow=narrow)

    @classmethod
    def candidates(cls, call: AttentionCall, machine: Machine) -> Iterator[tuple[str, Strategy]]:
        yield "ring", cls()
        yield "ring+fetch", cls(transfer="direct")
        yield "ring+fetch, own last", cls(transfer="direct", local_block_order="last")
        if machine.can_hold_all(call):
            ahead = partial(cls, "direct", prefetch_steps=call.ranks)
            together = partial(ahead, blocks_per_launch=call.ranks)
            yield "ring+fetch, all ahead", ahead()
            yield "ring+fetch, all ahead, own last", ahead(local_block_order="last")
            yield "ring+fetch, all together", together()
            yield "ring+fetch, all together, own last", together(local_block_order="last")
            yield "ring+fetch, all together, own divided", together(local_block_order="split")

    @classmethod
    def trials(cls) -> Mapping[str, Strategy]:
        return {
            "ring": cls(),
            "ring+fetch": cls("direct"),
            "ring+ahead": cls("direct", prefetch_steps=64),
            "ring+together": cls("direct", blocks_per_launch=2),
            "ring+last": cls("direct", prefetch_steps=64, local_block_order="last"),
            "ring+divided": cls("direct", prefetch_steps=64, blocks_per_launch=64, local_block_order="split"),
        }
