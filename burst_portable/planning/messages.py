"""What a message holds, and where it lies. Bytes of messages are counted only here.

The message of a block holds its rows, with all fields of a row side by side::

    row 0   K K K K | V V V V        messages that lie one after the other are one K and one V over all their rows,
    row 1   K K K K | V V V V        so a kernel takes them in one launch

========  ============================  =======================================================
side      forward, and backward inputs  backward results
========  ============================  =======================================================
kv        K, V                          dK, dV in the accumulation dtype
q         Q, dO, LSE, delta             dQ in the accumulation dtype
========  ============================  =======================================================

Narrow gradients travel in the dtype of the inputs, but are still summed in the accumulation dtype.

Where heads are resharded, a message to head shards holds some heads of all tensors side by side, and a message back
holds heads of one tensor: ``[rows, B, heads, dim]`` each.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import chain, groupby
from typing import NamedTuple

from burst_portable.planning.call import AttentionCall
from burst_portable.planning.plans import PASSES, PassName, PassPlan, Plan
from burst_portable.planning.routes import Move, Side

ALIGNMENT = 16
"""Bytes: every field of a row starts at a multiple of it, since kernels load straight from the message."""
_INBOX_ALIGNMENT = 256  # bytes: messages that are needed together begin at a multiple of it


@dataclass(frozen=True, slots=True)
class Field:
    """One tensor of a message: ``[B, rows, heads, dim]``, or ``[B, heads, rows]`` where dim is None."""

    heads: int
    dim: int | None
    itemsize: int

    def bytes(self, batch: int) -> int:
        """Bytes of a row."""
        return batch * self.heads * (self.dim or 1) * self.itemsize

    def size(self, batch: int) -> int:
        """Bytes of a row, padded to where the next field may start."""
        return -(-self.bytes(batch) // ALIGNMENT) * ALIGNMENT


def fields(call: AttentionCall, side: Side, *, result: bool, narrow: bool = False) -> tuple[Field, ...]:
    """Return the fields of a block, in the order of the table above. `narrow`: see `PassPlan`."""
    data, wide = call.itemsize, max(call.itemsize, 4)
    q, kv, d, dv = call.heads, call.kv_heads, call.head_dim, call.value_dim
    gradient = data if narrow else wide
    if side == "kv":
        itemsize = gradient if result else data
        return Field(kv, d, itemsize), Field(kv, dv, itemsize)
    if result:
        return (Field(q, d, gradient),)
    return Field(q, d, data), Field(q, dv, data), Field(q, None, wide), Field(q, None, wide)


def message_size(call: AttentionCall, move: Move, *, narrow: bool) -> int:
    """Return the bytes of a move on the wire. `narrow`: see `PassPlan`."""
    return (move.rows[1] - move.rows[0]) * row_size(call, move.side, result=move.result, narrow=narrow)


@lru_cache(maxsize=256)
def row_size(call: AttentionCall, side: Side, *, result: bool, narrow: bool = False) -> int:
    """Return the bytes of a row of a block on the wire."""
    return sum(field.size(call.batch) for field in fields(call, side, result=result, narrow=narrow))


def local_block_size(pass_plan: PassPlan, rank: int) -> int:
    """Return the bytes of a rank's own block of the side that travels, laid out as a message."""
    call, member = pass_plan.call, rank // pass_plan.stride
    layout = call.k_layout if pass_plan.side == "kv" else call.layout
    return layout.count(member) * row_size(call, pass_plan.side, result=False, narrow=pass_plan.narrow)


def needed_together(moves: Iterable[Move]) -> Iterator[list[Move]]:
    """The receives of one step, grouped by the later step that needs them: each group arrives in one buffer."""
    return (list(group) for _, group in groupby(moves, lambda m: m.needed))


class Exchange(NamedTuple):
    """What a rank gets from every other rank that divides heads with it, and sends to it, for one group of heads."""

    before: tuple[Field, ...]
    after: tuple[Field, ...]


def exchanges(plan: Plan, pass_name: PassName) -> list[Exchange]:
    """Return the exchanges around the computation of each group of heads; none if heads are not divided."""
    if plan.heads is None:
        return []
    p, part = plan.call, plan.forward.call
    data, d, dv = p.itemsize, p.head_dim, p.value_dim
    # Contributions of several ranks to a shared head are added up.
    gradients = max(data, 4) if p.kv_heads < plan.heads.ranks else data
    found = []
    for group in plan.head_groups:
        q, out = Field(part.heads, d, data), Field(part.heads, dv, data)
        itemsize = data if pass_name == "forward" else gradients
        kv = Field(part.kv_heads, d, itemsize), Field(part.kv_heads, dv, itemsize)
        if pass_name == "forward":
            found.append(Exchange((q, *(kv if group.first else ())), (out,)))
        else:
            found.append(Exchange((out,), (q, *(kv if group.last else ()))))
    return found


def head_room(plan: Plan, row: int, *, back: bool) -> int:
    """Bytes of every rank's inbox that one exchange takes, at `row` bytes per row; `back`: from head shards.

    The same on all ranks, although nodes may hold more or fewer rows.
    """
    shards, nodes = plan.call.layout, plan.forward.call.layout
    if back:
        return _aligned(plan.head_parallel_size * max(map(shards.count, range(shards.ranks))) * row)
    return _aligned(max(map(nodes.count, range(nodes.ranks))) * row)


@dataclass(frozen=True, slots=True)
class Inboxes:
    """Where messages lie, on a transport whose senders write into the memory of their receivers.

    Attributes:
        forward, backward: bytes of the largest inbox in that pass, divided by the ranks and rounded up.
        places: for each message that one rank sends or receives, the byte at which it begins in its receiver's inbox.
    """

    forward: int = 0
    backward: int = 0
    places: Mapping[Move, int] = field(default_factory=dict)


def inboxes(plan: Plan, rank: int) -> Inboxes:
    """The inboxes of a plan, as one rank needs them. Blocks that are needed together lie one after the other.

    Tensors of exchanges lie in front of them; `runtime.head_parallel` counts those places.
    """
    exchanged = [_exchange_inbox(plan, name) for name in PASSES]
    places: dict[Move, int] = {}
    sizes = []
    for (_, pass_plan), most in zip(plan.passes(), exchanged, strict=True):
        for target in range(plan.call.ranks if plan.nodes > 1 else 0):
            found, end = _places(pass_plan, target, max(exchanged))
            most = max(most, end)
            for move, place in found.items():
                if rank in (target, move.source):
                    assert places.setdefault(move, place) == place, "one place, forward and backward"
        sizes.append(-(-most // plan.call.ranks))
    return Inboxes(sizes[0], sizes[1], places)


def _places(pass_plan: PassPlan, target: int, start: int) -> tuple[dict[Move, int], int]:
    """The place of every message that comes to a rank, from `start` on, and where the last one ends.

    Inputs come first: a block that travels in both passes is the same `Move` in both, so it has one place. The rank's
    own block has a place behind those with which a launch takes it.
    """
    steps = pass_plan.steps_of(target)
    inputs, results = ([step.receives for step in steps], [step.result_receives for step in steps])
    joined = {step.index: local_block_size(pass_plan, target) for step in steps if step.joins_local}
    places: dict[Move, int] = {}
    end = start
    for moves in chain.from_iterable(map(needed_together, (*inputs, *results))):
        end = _aligned(end)
        for move in moves:
            places[move] = end
            end += message_size(pass_plan.call, move, narrow=pass_plan.narrow)
        if not moves[0].result:
            end += joined.get(moves[0].needed, 0)
    return places, end


def _exchange_inbox(plan: Plan, pass_name: PassName) -> int:
    """Bytes of an inbox that exchanges take, including LSE, which may be asked for; 0 if there are none."""
    p, size = plan.call, 0
    for there, back in exchanges(plan, pass_name):
        lse = Field(plan.forward.call.heads, None, max(p.itemsize, 4))
        size += head_room(plan, sum(field.size(p.batch) for field in there), back=False)
        size += sum(head_room(plan, field.bytes(p.batch), back=True) for field in (*back, lse))
    return size


def _aligned(size: int) -> int:
    return -(-size // _INBOX_ALIGNMENT) * _INBOX_ALIGNMENT
