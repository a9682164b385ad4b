"""The topology-aware double ring (BurstAttention, section 3.2; BurstEngine, arXiv 2509.19836; LoongTrain).

::

    for each node:                                     the outer ring
        send the block on to the next node             leaves now, is needed a whole inner round later
        for each rank of the node:                     the inner ring
            send the block on; receive the next
            compute

Either side may travel backward: "kv" as in `ring`, "q" as in `burst`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from burst_portable.moves import Side
from burst_portable.plans import Plan, Problem
from burst_portable.strategies.base import Traits, check_inner, check_name, ring_plan, route


@dataclass(frozen=True)
class DoubleRingStrategy:
    """`inner` ranks a node; None takes the largest divisor of the ranks that is at most 8 and below all of them."""

    inner: int | None = None
    travels: Side = "q"
    name: str = "double_ring"
    traits: ClassVar[Traits] = Traits()

    def __post_init__(self) -> None:
        check_inner(self.inner)
        check_name("travelling side", self.travels, ("kv", "q"))

    def plan(self, problem: Problem) -> Plan:
        inner, note = self.inner, ""
        if inner is None:
            inner = _node_size(problem.ranks)
            note = f"inner rings of {inner}: no node size was given"
        path = route(problem.ranks, "neighbour", inner)
        return ring_plan(problem, self.name, side=self.travels, path=path, note=note)


def _node_size(ranks: int) -> int:
    return max((i for i in range(1, min(ranks // 2, 8) + 1) if ranks % i == 0), default=1)
