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
from itertools import accumulate, chain, groupby
from typing import NamedTuple

from burst_portable.planning.call import AttentionCall
from burst_portable.planning.plans import PASSES, PassName, PassPlan, Plan
from burst_portable.planning.routes import Move, Side, holder, to_pack
from burst_portable.planning.schedule import Step

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
    q, kv, d, dv = call.heads, call.kv_heads, call.head_dim, call.v_head_dim
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
    return row_layout(call, side, result=result, narrow=narrow).size


def local_block_size(pass_plan: PassPlan, rank: int) -> int:
    """Return the bytes of a rank's own block of the side that travels, laid out as a message."""
    call, member = pass_plan.call, rank // pass_plan.stride
    layout = call.k_layout if pass_plan.side == "kv" else call.layout
    return layout.count(member) * row_size(call, pass_plan.side, result=False, narrow=pass_plan.narrow)


def needed_together(moves: Iterable[Move]) -> Iterator[list[Move]]:
    """Group the receives of one step by the later step that needs them: each group arrives in one buffer."""
    return (list(group) for _, group in groupby(moves, lambda m: m.needed))


class RowLayout(NamedTuple):
    """How one row of a message lies in memory.

    Attributes:
        size: Bytes from one row to the next.
        fields: The fields of a row, each with the byte at which it begins.
    """

    size: int
    fields: tuple[tuple[Field, int], ...]


class Arrivals(NamedTuple):
    """Messages that are needed by the same step, and arrive in one buffer.

    Attributes:
        moves: The messages, in the order in which they lie in the buffer.
        sizes: Bytes of each message, and of the room behind them for the local block if one launch takes it with them.
    """

    moves: tuple[Move, ...]
    sizes: tuple[int, ...]


class StepMessages(NamedTuple):
    """The messages of one `Step`, with their sizes.

    Attributes:
        packs: Rows [start, stop) of the local block to pack at this step, and bytes of the packed buffer.
        sends: Messages that leave. Each has the packed rows that contain it and its bytes [start, stop) there; the rows
            are None for a block that is forwarded as it arrived.
        receives: Blocks that arrive for later steps.
        local: Bytes of the local block, if the launch takes it together with blocks that arrived; else 0.
        sums: Sizes in bytes of the gradient sums of the blocks of this step, in the accumulation dtype.
        result_sends: Gradients that leave, with their bytes.
        result_receives: Gradients that arrive for later steps.
    """

    packs: tuple[tuple[tuple[int, int], int], ...]
    sends: tuple[tuple[Move, tuple[int, int] | None, int, int], ...]
    receives: tuple[Arrivals, ...]
    local: int
    sums: tuple[int, ...]
    result_sends: tuple[tuple[Move, int], ...]
    result_receives: tuple[Arrivals, ...]


class PassMessages:
    """The messages of one rank in one pass. Made when a call is prepared.

    Attributes:
        inputs: Row layout of a block.
        results: Row layout of gradients, as they travel.
        sums: Row layout of gradients, as they are summed.
        steps: For each step of the rank, the step and its messages.
        launches: Number of steps that compute.
    """

    def __init__(self, pass_plan: PassPlan, rank: int) -> None:
        call, side, narrow = pass_plan.call, pass_plan.side, pass_plan.narrow
        self.inputs = row_layout(call, side, result=False)
        self.results = row_layout(call, side, result=True, narrow=narrow)
        self.sums = row_layout(call, side, result=True)
        steps = pass_plan.steps_of(rank)
        result_rows = {move.owner: _rows(move) for step in steps for move in step.result_sends}
        local = local_block_size(pass_plan, rank)
        result_rows[rank] = local // self.inputs.size
        room = {step.index: local for step in steps if step.joins_local}
        packed: list[tuple[int, int]] = []
        self.steps = tuple((step, self._of_step(step, rank, packed, result_rows, room)) for step in steps)
        self.launches = sum(step.compute is not None for step in steps)

    def _of_step(
        self,
        step: Step,
        rank: int,
        packed: list[tuple[int, int]],
        result_rows: dict[int, int],
        room: dict[int, int],
    ) -> StepMessages:
        """Return the messages of a step.

        Args:
            step: The step.
            rank: Number of the rank.
            packed: Rows that were packed before; those of this step are added.
            result_rows: By owner, the rows of its gradients that are summed here.
            room: By step, the bytes of the local block if the launch of that step takes it with received blocks.
        """
        fresh = [move.rows for move in to_pack((m for m in step.sends if m.owner == rank), packed)]
        packed += fresh
        row = self.inputs.size
        return StepMessages(
            packs=tuple((rows, (rows[1] - rows[0]) * row) for rows in fresh),
            sends=tuple(self._leaving(move, rank, packed) for move in step.sends),
            receives=_arrivals(step.receives, row, room),
            local=room.get(step.index, 0),
            sums=tuple(
                result_rows.get(owner, 0) * self.sums.size
                for owner in (*(move.owner for move in step.arrivals), *([rank] if step.index in room else []))
            ),
            result_sends=tuple((move, _rows(move) * self.results.size) for move in step.result_sends),
            result_receives=_arrivals(step.result_receives, self.results.size, {}),
        )

    def _leaving(
        self, move: Move, rank: int, packed: list[tuple[int, int]]
    ) -> tuple[Move, tuple[int, int] | None, int, int]:
        if move.owner != rank:
            return move, None, 0, 0
        rows = holder(move.rows, packed)
        assert rows is not None, "what leaves is packed"
        start = (move.rows[0] - rows[0]) * self.inputs.size
        return move, rows, start, start + _rows(move) * self.inputs.size


def row_layout(call: AttentionCall, side: Side, *, result: bool, narrow: bool = False) -> RowLayout:
    """Return how a row of a block lies in a message."""
    found = fields(call, side, result=result, narrow=narrow)
    *starts, size = accumulate((field.size(call.batch) for field in found), initial=0)
    return RowLayout(size, tuple(zip(found, starts, strict=True)))


def _arrivals(moves: Iterable[Move], row: int, room: dict[int, int]) -> tuple[Arrivals, ...]:
    """Return receives by the step that needs them. `row`: bytes of a row; `room`: see `PassMessages._of_step`."""
    found = []
    for group in needed_together(moves):
        sizes = [_rows(move) * row for move in group]
        if behind := room.get(group[0].needed, 0):
            sizes.append(behind)
        found.append(Arrivals(tuple(group), tuple(sizes)))
    return tuple(found)


def _rows(move: Move) -> int:
    return move.rows[1] - move.rows[0]


class ExchangeFields(NamedTuple):
    """What a row of the messages between ranks that divide heads holds, for one group of heads.

    Attributes:
        before: Fields that come to head shards before the computation.
        after: Fields that go back after it; each has a message of its own.
    """

    before: tuple[Field, ...]
    after: tuple[Field, ...]


def exchanges(plan: Plan, pass_name: PassName) -> list[ExchangeFields]:
    """Return the exchanges around the computation of each group of heads; none if heads are not divided."""
    if plan.heads is None:
        return []
    p, part = plan.call, plan.forward.call
    data, d, dv = p.itemsize, p.head_dim, p.v_head_dim
    # Contributions of several ranks to a shared head are added up.
    gradients = max(data, 4) if p.kv_heads < plan.heads.ranks else data
    found = []
    for group in plan.head_groups:
        q, out = Field(part.heads, d, data), Field(part.heads, dv, data)
        itemsize = data if pass_name == "forward" else gradients
        kv = Field(part.kv_heads, d, itemsize), Field(part.kv_heads, dv, itemsize)
        if pass_name == "forward":
            found.append(ExchangeFields((q, *(kv if group.brings_kv else ())), (out,)))
        else:
            found.append(ExchangeFields((out,), (q, *(kv if group.returns_kv else ()))))
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
        offsets: for each message that one rank sends or receives, the byte at which it begins in its receiver's inbox.
    """

    forward: int = 0
    backward: int = 0
    offsets: Mapping[Move, int] = field(default_factory=dict)


def inboxes(plan: Plan, rank: int) -> Inboxes:
    """The inboxes of a plan, as one rank needs them. Blocks that are needed together lie one after the other.

    Tensors of exchanges lie in front of them; `runtime.head_parallel` counts those offsets.
    """
    exchanged = [_exchange_inbox(plan, name) for name in PASSES]
    offsets: dict[Move, int] = {}
    sizes = []
    for (_, pass_plan), most in zip(plan.passes(), exchanged, strict=True):
        for target in range(plan.call.ranks if plan.ring_size > 1 else 0):
            found, end = _places(pass_plan, target, max(exchanged))
            most = max(most, end)
            for move, offset in found.items():
                if rank in (target, move.source):
                    assert offsets.setdefault(move, offset) == offset, "one offset, forward and backward"
        sizes.append(-(-most // plan.call.ranks))
    return Inboxes(sizes[0], sizes[1], offsets)


def _places(pass_plan: PassPlan, target: int, start: int) -> tuple[dict[Move, int], int]:
    """Return the offset of every message that comes to a rank, from `start` on, and where the last one ends.

    Inputs come first: a block that travels in both passes is the same `Move` in both, so it has one place. The rank's
    own block has an offset behind those with which a launch takes it.
    """
    steps = pass_plan.steps_of(target)
    inputs, results = ([step.receives for step in steps], [step.result_receives for step in steps])
    joined = {step.index: local_block_size(pass_plan, target) for step in steps if step.joins_local}
    offsets: dict[Move, int] = {}
    end = start
    for moves in chain.from_iterable(map(needed_together, (*inputs, *results))):
        end = _aligned(end)
        for move in moves:
            offsets[move] = end
            end += message_size(pass_plan.call, move, narrow=pass_plan.narrow)
        if not moves[0].result:
            end += joined.get(moves[0].needed, 0)
    return offsets, end


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
