"""Define the contents of messages and their offsets. Only this module counts bytes of messages.

The message of a block has its rows, with all fields of a row side by side::

    row 0   K K K K | V V V V        contiguous messages are one K and one V over all their rows, so that one launch
    row 1   K K K K | V V V V        takes them

Gradients are summed and sent in the accumulation dtype. With `rounds_gradients`, they are sent in that of the inputs.
In the forward pass, a block of queries is Q alone, and its results are out and LSE in the accumulation dtype.
If heads are resharded, a message to head shards has some heads of all tensors side by side, and a message back has
heads of one tensor: ``[rows, B, heads, dim]`` each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache, partial
from itertools import accumulate, chain, groupby
from typing import NamedTuple

from burst_portable.planning.call import AttentionCall
from burst_portable.planning.plans import PASSES, PassName, PassPlan, Plan
from burst_portable.planning.routes import Move, Rows, Side, find_containing, to_pack
from burst_portable.planning.schedule import Step

ALIGNMENT = 16
"""Bytes: every field of a row starts at a multiple of it, because kernels load from the message."""
_INBOX_ALIGNMENT = 256  # bytes: messages that one step needs begin at a multiple of it


@dataclass(frozen=True, slots=True)
class Field:
    """One tensor of a message: ``[B, rows, heads, dim]``, or ``[B, heads, rows]`` if dim is None."""

    heads: int
    dim: int | None
    itemsize: int

    def bytes(self, batch: int) -> int:
        """Return the bytes of a row."""
        return batch * self.heads * (self.dim or 1) * self.itemsize

    def size(self, batch: int) -> int:
        """Return the bytes of a row, padded to the alignment of the next field."""
        return -(-self.bytes(batch) // ALIGNMENT) * ALIGNMENT


def fields(
    call: AttentionCall, side: Side, *, is_result: bool, rounds_gradients: bool = False, forward: bool = False
) -> tuple[Field, ...]:
    """Return the fields of a block: K and V, or Q, dO, LSE and delta. Those of its results: dK and dV, or dQ.

    In the forward pass, a block of queries is Q, and its results are out and LSE.
    """
    data, wide = call.itemsize, max(call.itemsize, 4)
    q, kv, d, dv = call.heads, call.kv_heads, call.head_dim, call.v_head_dim
    gradient = data if rounds_gradients else wide
    if side == "kv":
        itemsize = gradient if is_result else data
        return Field(kv, d, itemsize), Field(kv, dv, itemsize)
    if forward:
        return (Field(q, dv, wide), Field(q, None, wide)) if is_result else (Field(q, d, data),)
    if is_result:
        return (Field(q, d, gradient),)
    return Field(q, d, data), Field(q, dv, data), Field(q, None, wide), Field(q, None, wide)


def message_sizes(pass_plan: PassPlan, tensor: int | None = None) -> Callable[[Move], int]:
    """Return a function from a move of this pass to its bytes on the wire. `tensor`: see `row_layout`."""
    call, rounded, forward = pass_plan.call, pass_plan.rounds_gradients, pass_plan.name == "forward"
    rows = {
        (side, r): row_layout(call, side, is_result=r, rounds_gradients=rounded, forward=forward, tensor=tensor).size
        for side in pass_plan.sides
        for r in (False, True)
    }
    return lambda move: move.num_rows * rows[move.side, move.is_result]


@lru_cache(maxsize=256)
def row_size(
    call: AttentionCall, side: Side, *, is_result: bool, rounds_gradients: bool = False, forward: bool = False
) -> int:
    """Return the bytes of a row of a block on the wire. The arguments are those of `fields`."""
    return row_layout(call, side, is_result=is_result, rounds_gradients=rounds_gradients, forward=forward).size


def local_block_size(pass_plan: PassPlan, rank: int) -> int:
    """Return the bytes of the local block of the side that is sent, as a message."""
    return _local_rows(pass_plan, rank) * row_size(pass_plan.call, pass_plan.side, is_result=False)


def _local_rows(pass_plan: PassPlan, rank: int) -> int:
    layout = pass_plan.call.k_layout if pass_plan.side == "kv" else pass_plan.call.layout
    return layout.count(pass_plan.member(rank))


def group_by_wait_step(moves: Iterable[Move]) -> Iterator[list[Move]]:
    """Group the receives of one step by the later step that waits for them. Each group arrives in one buffer."""
    return (list(group) for _, group in groupby(moves, lambda m: m.wait_step))


class RowLayout(NamedTuple):
    """Memory layout of one row of a message."""

    size: int  # bytes from one row to the next
    fields: tuple[tuple[Field, int], ...]  # each with its offset in bytes


class Arrivals(NamedTuple):
    """Messages for which the same step waits. They arrive in one buffer."""

    moves: tuple[Move, ...]  # in their order in the buffer
    # Bytes of each message, and of the space behind them for the local block if one launch takes it with them.
    sizes: tuple[int, ...]


class StepMessages(NamedTuple):
    """The messages of one `Step`, with their sizes in bytes. Receives are for later steps."""

    side: Side | None  # of the step: see `Step.side`
    packs: tuple[tuple[Side, Rows, int], ...]  # rows of a local block to pack, and the size of the buffer
    # Each block has the packed rows that contain it and its bytes [start, stop) there. The rows are None for a block
    # that is forwarded as it arrived.
    sends: tuple[tuple[Move, Rows | None, int, int], ...]
    receives: tuple[Arrivals, ...]
    local: int  # size of the local block, if the launch takes it together with blocks that arrived; else 0
    sums: tuple[int, ...]  # of gradients of the blocks of this step, in the accumulation dtype
    result_sends: tuple[tuple[Move, int], ...]
    result_receives: tuple[Arrivals, ...]


class PassMessages:
    """The messages of one rank in one pass, or of one tensor of its blocks. Made when a call is prepared.

    `inputs`, `results` and `sums` are, by side, the row layouts of blocks, of results in a message, and of gradients
    while they are summed. `steps` has each step with its messages. `parts` is, in a forward pass, the number of partial
    results of the local rows: those of this rank's launches, and those that helpers return.
    """

    def __init__(self, pass_plan: PassPlan, rank: int, tensor: int | None = None) -> None:
        sides, forward, rounded = pass_plan.sides, pass_plan.name == "forward", pass_plan.rounds_gradients
        layout = partial(row_layout, pass_plan.call, tensor=tensor)
        self.inputs = {side: layout(side, is_result=False, forward=forward) for side in sides}
        self.results = {side: layout(side, is_result=True, rounds_gradients=rounded, forward=forward) for side in sides}
        self.sums = {side: layout(side, is_result=True) for side in sides}
        self._size = message_sizes(pass_plan, tensor)
        steps = pass_plan.steps_of(rank)
        local = _local_rows(pass_plan, rank) * self.inputs[pass_plan.side].size
        # By owner: rows of its gradients that are summed here.
        self._gradient_rows = {move.owner: move.num_rows for step in steps for move in step.result_sends}
        self._gradient_rows[rank] = local // self.inputs[pass_plan.side].size
        # By step: bytes of the local block, if the launch of that step takes it with received blocks.
        self._room = {step.index: local for step in steps if step.joins_local}
        # By side: rows of the messages that were packed at earlier steps.
        self._packed: dict[Side, list[Rows]] = {side: [] for side in sides}
        self._side = pass_plan.side
        self.steps = tuple((step, self._of_step(step, rank)) for step in steps)
        self.parts = sum(
            (step.compute is not None and step.side != "q") + len(step.result_receives) for step in steps if forward
        )

    def _of_step(self, step: Step, rank: int) -> StepMessages:
        packs = []
        for side, packed in self._packed.items():
            for move in to_pack((m for m in step.sends if m.owner == rank and m.side == side), packed):
                packed.append(move.rows)
                packs.append((side, move.rows, self._size(move)))
        size, room = self._size, self._room
        owners = (*(move.owner for move in step.arrivals), *([rank] if step.index in room else []))
        sums = self.sums[step.side or self._side].size
        return StepMessages(
            step.side,
            packs=tuple(packs),
            sends=tuple(self._send(move, rank) for move in step.sends),
            receives=_arrivals(step.receives, size, room),
            local=room.get(step.index, 0),
            sums=tuple(self._gradient_rows.get(owner, 0) * sums for owner in owners),
            result_sends=tuple((move, size(move)) for move in step.result_sends),
            result_receives=_arrivals(step.result_receives, size, {}),
        )

    def _send(self, move: Move, rank: int) -> tuple[Move, Rows | None, int, int]:
        if move.owner != rank:
            return move, None, 0, 0
        found = find_containing(move.rows, self._packed[move.side])
        assert found is not None, "a local block is packed before it is sent"
        rows, before = found
        start = before * self.inputs[move.side].size
        return move, rows, start, start + self._size(move)


def row_layout(
    call: AttentionCall,
    side: Side,
    *,
    is_result: bool,
    rounds_gradients: bool = False,
    forward: bool = False,
    tensor: int | None = None,
) -> RowLayout:
    """Return the memory layout of a row of a block, or of its results, in a message: see `fields`.

    `tensor`: Index of the only field in the message, if K and V are sent separately. Default: all fields.
    """
    found = fields(call, side, is_result=is_result, rounds_gradients=rounds_gradients, forward=forward)
    if tensor is not None:
        found = found[tensor : tensor + 1]
    *starts, size = accumulate((field.size(call.batch) for field in found), initial=0)
    return RowLayout(size, tuple(zip(found, starts, strict=True)))


def _arrivals(moves: Iterable[Move], size: Callable[[Move], int], room: dict[int, int]) -> tuple[Arrivals, ...]:
    """Return receives by the step that waits for them. `size`: bytes of a move; `room`: see `PassMessages`."""
    found = []
    for group in group_by_wait_step(moves):
        sizes = [size(move) for move in group]
        if behind := room.get(group[0].wait_step, 0):
            sizes.append(behind)
        found.append(Arrivals(tuple(group), tuple(sizes)))
    return tuple(found)


class ExchangeFields(NamedTuple):
    """Fields of a row in the messages between ranks that divide heads, for one group of heads."""

    to_heads: tuple[Field, ...]  # sent to head shards before the computation, in one message
    to_sequence: tuple[Field, ...]  # sent back after it, in one message each


def exchanges(plan: Plan, pass_name: PassName) -> list[ExchangeFields]:
    """Return the exchanges around the computation of each group of heads; none if heads are not divided."""
    if plan.heads is None:
        return []
    call, pass_call = plan.call, plan.forward.call
    data, d, dv = call.itemsize, call.head_dim, call.v_head_dim
    # Contributions of several ranks to a shared head are summed, so they are sent in the accumulation dtype.
    gradients = max(data, 4) if call.kv_heads < plan.heads.ranks else data
    found = []
    for group in plan.split_heads():
        q, out = Field(pass_call.heads, d, data), Field(pass_call.heads, dv, data)
        itemsize = data if pass_name == "forward" else gradients
        kv = Field(pass_call.kv_heads, d, itemsize), Field(pass_call.kv_heads, dv, itemsize)
        if pass_name == "forward":
            found.append(ExchangeFields((q, *(kv if group.brings_kv else ())), (out,)))
        else:
            found.append(ExchangeFields((out,), (q, *(kv if group.returns_kv else ()))))
    return found


def head_room(plan: Plan, row: int, *, back: bool) -> int:
    """Return the bytes that one exchange takes in every rank's inbox: the same on all ranks, sized by the largest.

    `row`: Bytes per row. `back`: Whether the exchange goes from head shards to sequence shards.
    """
    shards, nodes = plan.call.layout, plan.forward.call.layout
    if back:
        return _aligned(plan.head_parallel_size * max(map(shards.count, range(shards.ranks))) * row)
    return _aligned(max(map(nodes.count, range(nodes.ranks))) * row)


@dataclass(frozen=True, slots=True)
class Inboxes:
    """Offsets of messages, for a transport whose senders write into the memory of the receivers."""

    forward: int = 0  # bytes per sender: those of the largest inbox, divided by the ranks and rounded up
    backward: int = 0  # the same for the backward pass.
    # For each pass and each of its rounds (`Plan.rounds`), the offsets in bytes in the receivers' inboxes of the
    # messages that one rank sends or receives. Equal moves of both passes may have different offsets.
    offsets: Mapping[PassName, tuple[Mapping[Move, int], ...]] = field(default_factory=dict)


def inboxes(plan: Plan, rank: int) -> Inboxes:
    """Return the inboxes of a plan, for one rank. Blocks that one step needs are contiguous.

    Tensors of head exchanges come before them; `runtime.reshard` counts their offsets.
    """
    exchanged = [_exchange_bytes(plan, name) for name in PASSES]
    start = max(exchanged)
    rounds: dict[PassName, list[Mapping[Move, int]]] = {name: [] for name in PASSES}
    ends = dict(zip(PASSES, exchanged, strict=True))
    # Groups of divided heads have separate exchanges, and share the offsets of other messages.
    for tensor in plan.tensors * (1 if plan.heads else plan.head_groups):
        for name, pass_plan in plan.passes():
            offsets: dict[Move, int] = {}
            for target in range(plan.call.ranks if plan.ring_size > 1 else 0):
                found, end = _message_offsets(pass_plan, target, start, tensor)
                ends[name] = max(ends[name], end)
                offsets |= {move: offset for move, offset in found.items() if rank in (target, move.source)}
            rounds[name].append(offsets)
        start = _aligned(max(ends.values()))  # the messages of a round follow those of the round before
    forward, backward = (-(-end // plan.call.ranks) for end in ends.values())
    return Inboxes(forward, backward, {name: tuple(offsets) for name, offsets in rounds.items()})


def _message_offsets(pass_plan: PassPlan, target: int, start: int, tensor: int | None) -> tuple[dict[Move, int], int]:
    """Return the offset of every message to a rank, from `start` on, and the end of the last message.

    Blocks come first. The local block follows the blocks with which a launch takes it.
    """
    steps = pass_plan.steps_of(target)
    blocks, results = ([step.receives for step in steps], [step.result_receives for step in steps])
    joined = {step.index: local_block_size(pass_plan, target) for step in steps if step.joins_local}
    size = message_sizes(pass_plan, tensor)
    offsets: dict[Move, int] = {}
    end = start
    for moves in chain.from_iterable(map(group_by_wait_step, (*blocks, *results))):
        end = _aligned(end)
        for move in moves:
            offsets[move] = end
            end += size(move)
        if not moves[0].is_result:
            end += joined.get(moves[0].wait_step, 0)
    return offsets, end


def _exchange_bytes(plan: Plan, pass_name: PassName) -> int:
    """Return the bytes that the head exchanges of a pass take in an inbox, including LSE, which a call may request."""
    call, size = plan.call, 0
    for to_heads, to_sequence in exchanges(plan, pass_name):
        lse = Field(plan.forward.call.heads, None, max(call.itemsize, 4))
        size += head_room(plan, sum(field.size(call.batch) for field in to_heads), back=False)
        size += sum(head_room(plan, field.bytes(call.batch), back=True) for field in (*to_sequence, lse))
    return size


def _aligned(size: int) -> int:
    return -(-size // _INBOX_ALIGNMENT) * _INBOX_ALIGNMENT
