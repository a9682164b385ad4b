"""What a message holds: the fields of a block, one after the other in one buffer. Bytes are counted here alone.

========  ============================  =======================================================
side      forward, and backward inputs  backward results
========  ============================  =======================================================
kv        K, V                          dK, dV in the accumulation dtype
q         Q, dO, LSE, delta             dQ in the accumulation dtype
========  ============================  =======================================================
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from burst_portable.moves import Move
from burst_portable.plans import PassName, PassPlan, Plan, Problem

ALIGNMENT = 128
"""Every field starts at a multiple of it, so that a kernel can load straight from the message."""


@dataclass(frozen=True, slots=True)
class Field:
    """One tensor of a message: ``[B, rows, heads, dim]``, or ``[B, heads, rows]`` where dim is None."""

    heads: int
    dim: int | None
    itemsize: int

    def shape(self, batch: int, rows: int) -> tuple[int, ...]:
        """Its shape for so many rows."""
        return (batch, self.heads, rows) if self.dim is None else (batch, rows, self.heads, self.dim)

    def size(self, batch: int, rows: int) -> int:
        """Bytes, up to where the next field may start."""
        size = batch * rows * self.heads * (self.dim or 1) * self.itemsize
        return -(-size // ALIGNMENT) * ALIGNMENT


def fields(problem: Problem, side: str, *, result: bool, backward: bool) -> tuple[Field, ...]:
    """The fields of a block, in the order of the table above."""
    data, wide = problem.itemsize, max(problem.itemsize, 4)
    q, kv, d, dv = problem.heads, problem.kv_heads, problem.head_dim, problem.value_dim
    if side == "kv":
        itemsize = wide if result else data
        return Field(kv, d, itemsize), Field(kv, dv, itemsize)
    assert backward, "queries travel in the backward pass alone"
    if result:
        return (Field(q, d, wide),)
    return Field(q, d, data), Field(q, dv, data), Field(q, None, wide), Field(q, None, wide)


def message_size(problem: Problem, move: Move, *, backward: bool) -> int:
    """Bytes of a move on the wire."""
    rows = move.rows[1] - move.rows[0]
    return sum(f.size(problem.batch, rows) for f in fields(problem, move.side, result=move.result, backward=backward))


def inbox_size(plan: Plan, pass_name: PassName) -> int:
    """Bytes that any one rank sends to any other in a pass, at most; every message begins at a multiple of 256."""
    part = plan.forward if pass_name == "forward" else plan.backward
    if plan.reshard:
        return _reshard_inbox(plan.problem, pass_name)
    return max(_pair_sizes(part, backward=pass_name == "backward").values(), default=0)


def _pair_sizes(part: PassPlan, *, backward: bool) -> Counter[tuple[int, int]]:
    """Bytes by (source, target)."""
    sizes: Counter[tuple[int, int]] = Counter()
    for rank in range(part.problem.ranks):
        for step in part.rank(rank):
            for move in (*step.receives, *step.result_receives):
                sizes[move.source, rank] += _aligned(message_size(part.problem, move, backward=backward))
    return sizes


def _reshard_inbox(problem: Problem, pass_name: PassName) -> int:
    """The same where heads are resharded: what `autograd` sends there and back."""
    ranks, rows = problem.ranks, max(map(problem.q_layout.count, range(problem.ranks)))
    q, kv = problem.heads // ranks, max(1, problem.kv_heads // ranks)
    d, dv, data, wide = problem.head_dim, problem.value_dim, problem.itemsize, max(problem.itemsize, 4)
    if pass_name == "forward":
        sizes = [q * d * data, kv * d * data, kv * dv * data, q * dv * data, q * wide]
    else:
        gradients = wide if problem.kv_heads < ranks else data
        sizes = [q * dv * data, q * d * data, kv * d * gradients, kv * dv * gradients]
    return sum(_aligned(problem.batch * rows * size) for size in sizes)


def _aligned(size: int) -> int:
    return -(-size // 256) * 256
