"""The topology-aware double ring (BurstAttention, section 3.2; BurstEngine, arXiv 2509.19836; LoongTrain).

::

    for each node:                                     the outer ring
        send the block on to the next node             leaves now, is needed a whole inner round later
        for each rank of the node:                     the inner ring
            send the block on; receive the next
            compute

Either side may travel backward: "kv" as in `ring`, "q" as in `burst`. Backward, gradients of other nodes' blocks go
home a whole inner round long. So that those of the last node have work beside them, too, the own node's round is
divided::

    the first steps of the own node's round            meanwhile the next node's block comes
    for each other node: a round
    the rest of the own node's round                   meanwhile the last gradients go home

Never more blocks are held for it: what is left of the round begins at the blocks' owners.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from burst_portable.planning.call import AttentionCall
from burst_portable.planning.messages import row_size
from burst_portable.planning.plans import Plan
from burst_portable.planning.routes import DoubleRing, Side
from burst_portable.strategies.base import Machine, Strategy, node_size, ring_plan, travel_narrow
from burst_portable.strategies.options import GRADIENTS, INNER, TRAVELS, GradientWidth, option
from burst_portable.utils.values import check_divides


@dataclass(frozen=True)
class DoubleRingStrategy(Strategy):
    """`inner` ranks per node; None takes the largest divisor of the ranks that is at most 8 and below all of them."""

    name = "double_ring"
    title = "as ring or burst, round rings inside nodes and a ring over the nodes"

    inner: int | None = option(INNER)
    travels: Side = option(TRAVELS)
    gradients: GradientWidth = option(GRADIENTS)

    def plan(self, call: AttentionCall) -> Plan:
        narrow = travel_narrow(call, self.gradients)
        inner, note = self.inner, ""
        if inner is None:
            inner = node_size(call.ranks)
            note = f"inner rings of {inner}: no node size was given"
        check_divides(inner, call.ranks)
        path = DoubleRing(call.ranks, inner, first=inner)
        back = replace(path, first=_first_steps(call, self.travels, inner, narrow=narrow))
        return ring_plan(call, self.name, side=self.travels, path=path, back=back, note=note, narrow=narrow)

    @classmethod
    def candidates(cls, call: AttentionCall, machine: Machine) -> Iterator[tuple[str, Strategy]]:
        if machine.ranks_per_node is not None and machine.ranks_per_node > 1:
            yield "double_ring", cls(machine.ranks_per_node)
            yield "double_ring+kv", cls(machine.ranks_per_node, travels="kv")

    @classmethod
    def trials(cls) -> Mapping[str, Strategy]:
        return {"double_ring": cls(), "double_ring+kv": cls(travels="kv")}


def _first_steps(call: AttentionCall, side: Side, inner: int, *, narrow: bool) -> int:
    """Steps of the own node's round for a block to come; the rest is for gradients to go home. By their bytes."""
    if inner == call.ranks:
        return inner
    block, gradients = (row_size(call, side, result=result, narrow=narrow) for result in (False, True))
    return max(1, round(inner * block / (block + gradients)))
