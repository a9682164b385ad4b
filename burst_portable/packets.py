"""What a message holds: the rows of a block, all fields of a row side by side. Bytes are counted here alone.

::

    row 0   K K K K | V V V V        messages that lie one after the other are one K and one V of all their rows,
    row 1   K K K K | V V V V        and so one launch

========  ============================  =======================================================
side      forward, and backward inputs  backward results
========  ============================  =======================================================
kv        K, V                          dK, dV in the accumulation dtype
q         Q, dO, LSE, delta             dQ in the accumulation dtype
========  ============================  =======================================================
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import groupby

from burst_portable.moves import Move, Side
from burst_portable.plans import PassName, PassPlan, Plan, Problem

ALIGNMENT = 16
"""In every row, a field starts at a multiple of so many bytes: kernels load straight from the message."""


@dataclass(frozen=True, slots=True)
class Field:
    """One tensor of a message: ``[B, rows, heads, dim]``, or ``[B, heads, rows]`` where dim is None."""

    heads: int
    dim: int | None
    itemsize: int

    def size(self, batch: int) -> int:
        """Bytes of a row, up to where the next field may start."""
        size = batch * self.heads * (self.dim or 1) * self.itemsize
        return -(-size // ALIGNMENT) * ALIGNMENT


def fields(problem: Problem, side: Side, *, result: bool) -> tuple[Field, ...]:
    """The fields of a block, in the order of the table above."""
    data, wide = problem.itemsize, max(problem.itemsize, 4)
    q, kv, d, dv = problem.heads, problem.kv_heads, problem.head_dim, problem.value_dim
    if side == "kv":
        itemsize = wide if result else data
        return Field(kv, d, itemsize), Field(kv, dv, itemsize)
    if result:
        return (Field(q, d, wide),)
    return Field(q, d, data), Field(q, dv, data), Field(q, None, wide), Field(q, None, wide)


def message_size(problem: Problem, move: Move) -> int:
    """Bytes of a move on the wire."""
    row = sum(one.size(problem.batch) for one in fields(problem, move.side, result=move.result))
    return (move.rows[1] - move.rows[0]) * row


@dataclass(frozen=True, slots=True)
class Inboxes:
    """Where messages come to lie, on a transport whose senders write into the memory of their receivers.

    Attributes:
        forward, backward: bytes of a rank's inbox in that pass, over the ranks: what each of them gets room for.
        places: the byte at which a message lies, in the inbox of its receiver; of what one rank sends and receives.
    """

    forward: int = 0
    backward: int = 0
    places: Mapping[Move, int] = field(default_factory=dict)


def inboxes(plan: Plan, rank: int) -> Inboxes:
    """The inboxes of a plan as one rank needs them. Blocks that are needed together lie one after the other."""
    if plan.reshard:  # every rank sends every other as much: the transport finds the places
        return Inboxes(_reshard_inbox(plan.problem, "forward"), _reshard_inbox(plan.problem, "backward"))
    places: dict[Move, int] = {}
    sizes = []
    for _, part in plan.passes():
        most = 0
        for target in range(part.problem.ranks):
            found, end = _places(part, target)
            most = max(most, end)
            for move, place in found.items():
                if rank in (target, move.source):
                    assert places.setdefault(move, place) == place, "one place, forward and backward"
        sizes.append(-(-most // part.problem.ranks))
    return Inboxes(sizes[0], sizes[1], places)


def _places(part: PassPlan, target: int) -> tuple[dict[Move, int], int]:
    """The place of every message that comes to a rank, and where the last one ends.

    Inputs come first: what travels forward and backward alike is one and the same move, and has one place.
    """
    steps = part.rank(target)
    inputs = [list(moves) for step in steps for _, moves in groupby(step.receives, lambda m: m.needed)]
    places: dict[Move, int] = {}
    end = 0
    for moves in (*inputs, *([move] for step in steps for move in step.result_receives)):
        end = _aligned(end)
        for move in moves:
            places[move] = end
            end += message_size(part.problem, move)
    return places, end


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
