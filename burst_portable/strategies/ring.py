"""RingAttention (arXiv 2310.01889): K and V circulate, and in the backward pass dK and dV follow them.

Each rank holds one shard of q, k and v, and computes the output of its queries. `RingStrategy.plan` only lists messages
and computations. This loop then runs on every rank; on the right, the file and function that does it::

    forward                                             planning/routes.py, RingRoute: who sends what, at which step
        block = local k, v
        for step in range(ranks):                       runtime/executor.py, forward_rows
            if step > 0:
                block = wait for the received block     Blocks.begin
            send block to rank + 1                      Blocks.post, comm/*.py: runs during the computation
            receive the next block from rank - 1
            out, lse = merge((out, lse), attend(q, *block))
                                                        kernels/*.py; numerics.py defines the merge
    backward
        for step in range(ranks):                       runtime/executor.py, backward_rows
            wait, send and receive blocks as above
            dq, dk, dv of block += attend_backward(q, *block, dout, lse, delta)
            if step > 0:
                add dk, dv received from rank - 1       BlockGradients.end
                send the sum to rank + 1, after its block; the last rank sends it to the block's owner

With a mask, a rank receives only blocks that it needs; the tiles of a block are in planning/tiles.py. With
`transfer="direct"`, each block comes from its owner and its gradients go straight back: `DirectRoute`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

from burst_portable.planning.call import AttentionCall
from burst_portable.planning.plans import Plan
from burst_portable.strategies.base import Machine, Strategy, kv_plan, make_route
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
    """Send K and V in both passes."""

    name = "ring"
    title = "K and V circulate; backward, dK and dV follow them"
    suggested = ("ring", "ring(transfer=direct)")

    transfer: Transfer = option(TRANSFER)
    prefetch_steps: int = option(PREFETCH_STEPS)
    blocks_per_launch: int = option(BLOCKS_PER_LAUNCH)
    local_block_order: LocalBlockOrder = option(LOCAL_BLOCK_ORDER)
    gradient_comm_dtype: GradientCommDtype = option(GRADIENT_COMM_DTYPE)

    def plan(self, call: AttentionCall) -> Plan:
        make = partial(make_route, call.ranks, self.transfer, self.prefetch_steps, self.blocks_per_launch)
        return kv_plan(call, self.name, make, self.local_block_order, self.gradient_comm_dtype)

    @classmethod
    def candidates(cls, call: AttentionCall, machine: Machine) -> Iterator[Strategy]:
        yield cls()
        yield cls("direct")
        yield cls("direct", local_block_order="last")
        if machine.can_hold_all(call):
            prefetch = partial(cls, "direct", prefetch_steps=call.ranks)
            one_launch = partial(prefetch, blocks_per_launch=call.ranks)
            yield prefetch()
            yield prefetch(local_block_order="last")
            yield one_launch()
            yield one_launch(local_block_order="last")
            yield one_launch(local_block_order="split")

    @classmethod
    def trials(cls) -> Iterator[Strategy]:
        yield cls()
        yield cls("direct")
        yield cls("direct", prefetch_steps=64)
        yield cls("direct", blocks_per_launch=2)
        yield cls("direct", prefetch_steps=64, local_block_order="last")
        yield cls("direct", prefetch_steps=64, blocks_per_launch=64, local_block_order="split")
