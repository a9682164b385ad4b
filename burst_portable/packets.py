"""What a message holds: the fields of a block, one after the other in one buffer. Bytes are counted here alone.

========  ============================  =======================================================
side      forward, and backward inputs  backward results
========  ============================  =======================================================
kv        K, V                          dK, dV in the accumulation dtype
q         Q, dO, LSE, delta             dQ in the accumulation dtype
========  ============================  =======================================================
"""

from __future__ import annotations

from dataclasses import dataclass

from burst_portable.moves import Move
from burst_portable.plans import Problem

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
