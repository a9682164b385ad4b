"""DeepSpeed-Ulysses (arXiv 2309.14509): from sequence shards to head shards, plain attention, and back.

::

    q, k, v <- all-to-all: all rows of some heads
    out <- attend(q, k, v) over the whole sequence
    out <- all-to-all: all heads of some rows

Ranks hold whole K/V heads: their number must be a multiple of the ranks, or divide them (then ranks that share a
K/V head each get a copy, and its gradients are added up).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from burst_portable.errors import UnsupportedError, explain
from burst_portable.layout import contiguous
from burst_portable.moves import Ring
from burst_portable.plans import PassPlan, Plan, Problem
from burst_portable.strategies.base import Traits


@dataclass(frozen=True)
class UlyssesStrategy:
    """Heads are sharded during the attention."""

    name: str = "ulysses"
    traits: ClassVar[Traits] = Traits(shards="heads")

    def plan(self, problem: Problem) -> Plan:
        ranks = problem.ranks
        shared = problem.kv_heads % ranks == 0 or ranks % problem.kv_heads == 0
        if problem.heads % ranks or not shared:
            raise UnsupportedError(
                explain(
                    "ulysses cannot share these heads out",
                    got=f"{problem.heads} query and {problem.kv_heads} K/V heads on {ranks} ranks",
                    allowed="query heads a multiple of the ranks; K/V heads a multiple or a divisor of them",
                    next_step="use the strategy 'ring' or 'burst'",
                )
            )
        # After the first all-to-all every rank holds all rows, in their natural order: a problem of one rank.
        whole = replace(
            problem,
            q_layout=contiguous(problem.q_layout.length, 1),
            k_layout=contiguous(problem.k_layout.length, 1),
            heads=problem.heads // ranks,
            kv_heads=max(1, problem.kv_heads // ranks),
        )
        part = PassPlan(whole, "kv", Ring(1))
        return Plan(problem, self.name, forward=part, backward=replace(part, results=Ring(1)), reshard="heads")
