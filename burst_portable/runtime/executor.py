"""Runs one rank's steps of a pass, whatever the strategy. (`head_parallel` brings resharded heads here, and home.)

::

    for each step:  what arrives   ->   send on, receive ahead   ->   compute   ->   gradients after their block

`planning.schedule.Step` says what each step holds, `planning.routes.Move` when a message leaves and when it is needed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from itertools import accumulate

import torch
from torch import Tensor

from burst_portable import numerics
from burst_portable import numerics as wide_copy
from burst_portable.comm.base import Handle
from burst_portable.kernels.base import Gradients, Options
from burst_portable.numerics import State, accumulation_dtype, as_dtype, empty_state
from burst_portable.planning.messages import Field, fields, message_size, needed_together
from burst_portable.planning.plans import PassPlan
from burst_portable.planning.routes import Move, holder, to_pack
from burst_portable.planning.schedule import Step
from burst_portable.runtime.observer import Queries, Runtime

RowDelta = Callable[[Tensor, Tensor], Tensor]
"""`numerics.row_delta`, or a kernel's own."""
Saved = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
"""What backward needs: q, k, v of the rows at hand, their out and their LSE."""
Views = tuple[Tensor, ...]
"""The tensors of a block: (k, v), (q, dO, LSE, delta), or gradients; over messages, or a rank's own."""


def run_forward(
    pass_plan: PassPlan, runtime: Runtime, options: Options, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None
) -> State:
    """(out ``[B, S, Hq, Dv]`` in q's dtype or wider, LSE ``[B, Hq, S]`` in the accumulation dtype) of the rows at hand.

    Args:
        q: ``[B, S, Hq, D]``.
        k, v: ``[B, S', Hkv, D]`` and ``[B, S', Hkv, Dv]`` at hand; those of others come as the plan says.
        sinks: ``[Hq]``, one logit per query head, or None.
    """
    rank = runtime.transport.rank
    if sinks is None and (compute := pass_plan.alone(rank)):
        state = runtime.attend_whole(compute, q, k, v, options)
    else:  # sinks are merged before out is rounded
        state = _forward_steps(pass_plan, rank, runtime, options, q, k, v, rounds=sinks is None)
    if sinks is not None:
        numerics.add_sinks(state, sinks)
    return state[0], as_dtype(state[1], accumulation_dtype(q.dtype))


def run_backward(
    pass_plan: PassPlan,
    runtime: Runtime,
    options: Options,
    dout: Tensor,
    kept: Saved,
    row_delta: RowDelta | None,
    delta: Tensor | None = None,
) -> Gradients:
    """(dq, dk, dv) of the rows at hand, shaped as q, k and v, in their dtype or the accumulation dtype.

    Args:
        dout: ``[B, S, Hq, Dv]``.
        kept: of the same rows.
        row_delta: None where the kernel is given out, which does not travel, in place of delta.
        delta: ``[B, Hq, S]``, where it is there already.
    """
    q, k, v, out, lse = kept
    rank = runtime.transport.rank
    if compute := pass_plan.alone(rank):
        return runtime.gradients(compute, (dout, q, k, v, out, lse), options)
    if row_delta is None:
        queries = Queries(q, dout, lse, out=out)
    else:
        queries = Queries(q, dout, lse, row_delta(dout, out) if delta is None else delta)
    return _backward_steps(pass_plan, rank, runtime, options, queries, k, v)


def _forward_steps(
    pass_plan: PassPlan,
    rank: int,
    runtime: Runtime,
    options: Options,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    rounds: bool,
) -> State:
    """(out, LSE) of this rank's queries, in the dtypes that the kernel keeps while it merges: see `numerics.finished`.

    rounds: out may be in q's dtype, and rows that one step computes are written in it at once::

        one computation                     all rows are rounded                                attend_whole
        several, and few rows are merged    rows that are complete after the first are rounded  attend_first, attend
        several                             none: all are merged in the wider dtype             attend
    """
    steps = pass_plan.steps_of(rank)
    once = rounds and sum(step.compute is not None for step in steps) == 1
    merged = pass_plan.merged_rows(rank) if rounds and runtime.parts_rows else None
    first = None if merged is None else (merged, q.new_empty((*q.shape[:3], v.shape[-1])))
    blocks = _Blocks(pass_plan, rank, runtime, (k, v), q.dtype, backward=False)
    state: State | None = None
    stays = replace(options, makes_way=False)
    for step in steps:
        blocks.begin(step)
        if step.compute:
            keys, values = blocks.use(step)
            how = options if blocks.moving(step.index) else stays
            if once:
                state = runtime.attend_whole(step.compute, q, keys, values, how)
            elif state is None and first is not None:
                state = runtime.attend_first(step.compute, q, keys, values, how, *first)
            else:
                state = runtime.attend(step.compute, q, keys, values, how, state)
        blocks.end(step)
    blocks.finish()
    if state is None:
        return empty_state(q, v.shape[-1])
    if first is None:
        return state
    merged, out = first
    rows_of(out, merged).copy_(rows_of(state[0], merged))
    return out, state[1]


def _backward_steps(
    pass_plan: PassPlan, rank: int, runtime: Runtime, options: Options, queries: Queries, k: Tensor, v: Tensor
) -> Gradients:
    """(dq, dk, dv) of this rank's shard, in the accumulation dtype; delta must be given where queries travel."""
    own = (queries.q, k, v)
    dq, dk, dv = (torch.zeros(x.shape, dtype=accumulation_dtype(x.dtype), device=x.device) for x in own)
    travels_kv = pass_plan.side == "kv"
    own_block, own_gradients = ((k, v), (dk, dv)) if travels_kv else (_travelling(queries), (dq,))
    blocks = _Blocks(pass_plan, rank, runtime, own_block, queries.q.dtype, backward=True)
    results = _Results(blocks, own_gradients)
    for step in pass_plan.steps_of(rank):
        blocks.begin(step)
        if compute := step.compute:
            block, sums = blocks.use(step), results.accumulators(step)
            if travels_kv:
                (keys, values), mine, into = block, queries, (dq, *sums)
            else:
                (keys, values), mine, into = (k, v), Queries(*block), (*sums, dk, dv)
            runtime.attend_backward(compute, mine, keys, values, options, into)
        results.end(step)
        blocks.end(step)
    results.finish()
    blocks.finish()
    return dq, dk, dv


def _travelling(queries: Queries) -> Views:
    """The tensors of a rank's queries, as they travel backward."""
    assert queries.delta is not None, "delta travels with queries, out does not"
    return queries.q, queries.dout, queries.lse, queries.delta


class _Blocks:
    """The blocks of one pass: this rank's own, and foreign ones that are here or on their way.

    Blocks that one step needs arrive in one buffer, one after the other, so that the kernel reads them as one.
    """

    def __init__(
        self,
        pass_plan: PassPlan,
        rank: int,
        runtime: Runtime,
        own: Views,
        dtype: torch.dtype,
        *,
        backward: bool,
    ) -> None:
        self.pass_plan, self.rank, self.runtime, self.backward = pass_plan, rank, runtime, backward
        self._own, self.dtype, self.device = own, dtype, own[0].device
        self._arriving: dict[Move, tuple[Handle, Tensor]] = {}
        self._held: dict[int, Tensor] = {}
        self._inbox_of: dict[int, Tensor] = {}  # by step: the buffer of all blocks that it needs
        self._packed: dict[tuple[int, int], Tensor] = {}  # by rows: messages of our own block
        self._leaving: list[tuple[int, Handle, Tensor]] = []  # (step that needs it where it goes, handle, message)
        self._step = 0

    def begin(self, step: Step) -> None:
        """Wait for what this step needs; send what leaves, and post receives for later steps."""
        self._step = step.index
        for move in step.arrivals:
            self._held[move.owner] = self.take(move)
        self._pack(m for m in step.sends if m.owner == self.rank)
        self.post([(m, self._outgoing(m)) for m in step.sends], step.receives, step.index)

    def use(self, step: Step) -> Views:
        """The tensors of the travelling side that a step computes with."""
        if not step.arrivals:
            return self._own
        views = self.views(step.arrivals, self._inbox_of[step.index])
        return tuple(x if x.dim() == 4 else x.contiguous() for x in views)  # kernels take LSE and delta in one piece

    def moving(self, step: int) -> bool:
        """Whether messages that later steps need are under way beside this step."""
        return bool(self._arriving) or any(needed > step for needed, _, _ in self._leaving)

    def end(self, step: Step) -> None:
        """Release blocks that no later step uses, and messages that their receivers have needed by now."""
        self._wait_until_left(step.index)
        self._inbox_of.pop(step.index, None)
        for owner in step.released:
            del self._held[owner]

    def finish(self) -> None:
        """Wait until everything that was sent has left."""
        self._wait_until_left(max((needed for needed, _, _ in self._leaving), default=0))
        assert not self._held, "the plan releases every block"
        assert not self._arriving, "the plan waits for every move"

    def post(self, sends: list[tuple[Move, Tensor]], receives: Sequence[Move], step: int) -> None:
        """Start moves."""
        if not sends and not receives:
            return
        incoming = [pair for moves in needed_together(receives) for pair in self._inboxes(moves)]
        leaving, arriving = self.runtime.post(sends, incoming, step, backward=self.backward)
        self._leaving += [(m.needed, handle, buffer) for handle, (m, buffer) in zip(leaving, sends, strict=True)]
        for handle, (move, buffer) in zip(arriving, incoming, strict=True):
            self._arriving[move] = handle, buffer

    def _wait_until_left(self, step: int) -> None:
        """Wait for messages that their receivers need by this step; later ones may be crossing to another node."""
        for needed, handle, _ in self._leaving:
            if needed <= step:
                handle.wait()
        self._leaving = [one for one in self._leaving if one[0] > step]

    def take(self, move: Move) -> Tensor:
        """Wait for the message of a move that has been posted."""
        handle, buffer = self._arriving.pop(move)
        handle.wait()
        return buffer

    def copying(self) -> AbstractContextManager[object]:
        """A context around the copies of a step, for the profiler."""
        return self.runtime.copying(self.device, self._step, backward=self.backward)

    def buffer(self, size: int) -> Tensor:
        """An empty buffer for messages."""
        return self.runtime.transport.buffer(size, self.device)

    def size(self, move: Move) -> int:
        """Bytes of a move."""
        return message_size(self.pass_plan.call, move, narrow=self.pass_plan.narrow)

    def _inboxes(self, moves: list[Move]) -> Iterator[tuple[Move, Tensor]]:
        """Moves that are needed together, each with its part of one buffer for all of them."""
        sizes = [self.size(move) for move in moves]
        inbox = self.runtime.inbox(moves, sum(sizes), self.device)
        if not moves[0].result:
            self._inbox_of[moves[0].needed] = inbox
        yield from zip(moves, torch.split(inbox, sizes) if len(sizes) > 1 else (inbox,), strict=True)

    def views(self, moves: Sequence[Move], buffer: Tensor, *, wide: bool = False) -> Views:
        """The fields of messages that lie one after the other in a buffer, each field as one tensor over all rows.

        wide: whether gradients are in the accumulation dtype although they travel narrow.
        """
        call, first = self.pass_plan.call, moves[0]
        held = fields(call, first.side, result=first.result, narrow=self.pass_plan.narrow and not wide)
        rows = sum(m.rows[1] - m.rows[0] for m in moves)
        starts = accumulate((field.size(call.batch) for field in held), initial=0)
        return tuple(_view(f, buffer, at, rows, call.batch, self.dtype) for f, at in zip(held, starts, strict=False))

    def _pack(self, sends: Iterable[Move]) -> None:
        """Pack the rows of our own block that leave, each once: rows within others are part of their message."""
        for move in to_pack(sends, self._packed):
            self._packed[move.rows] = buffer = self.buffer(self.size(move))
            with self.copying():
                for view, tensor in zip(self.views([move], buffer), self._own, strict=True):
                    wide_copy.copy(rows_of(tensor, move.rows), view)

    def _outgoing(self, move: Move) -> Tensor:
        """The message of a block that leaves: a foreign block as it arrived, or packed rows of our own."""
        if move.owner != self.rank:
            return self._held[move.owner]
        rows = holder(move.rows, self._packed)
        assert rows is not None, "what leaves is packed"
        size = self.size(move)
        start = size // (move.rows[1] - move.rows[0]) * (move.rows[0] - rows[0])
        return self._packed[rows][start : start + size]


class _Results:
    """Gradients of the travelling side: of our own block, and of foreign blocks until they are sent home."""

    def __init__(self, blocks: _Blocks, own: Views) -> None:
        self._blocks, self._own = blocks, own
        self._made: dict[int, Tensor] = {}  # by owner: sums that have not left
        results = [m for step in blocks.pass_plan.steps_of(blocks.rank) for m in step.result_sends]
        self._sends = {m.owner: m for m in results}

    def accumulators(self, step: Step) -> Views:
        """The buffers to which the kernel adds a step's gradients: our own sums, or fresh zeros for foreign blocks."""
        if not step.arrivals:
            return self._own
        moves = [self._sends[move.owner] for move in step.arrivals]
        sizes = [message_size(self._blocks.pass_plan.call, move, narrow=False) for move in moves]
        sums = self._blocks.buffer(sum(sizes))
        with self._blocks.copying():
            sums.zero_()
        self._made.update(zip((move.owner for move in moves), torch.split(sums, sizes), strict=True))
        return self._blocks.views(moves, sums, wide=True)

    def end(self, step: Step) -> None:
        """Add gradients that arrived, and send on those that are complete here."""
        for move in step.result_arrivals:
            self._add(move)
        sends = [(m, self._outgoing(m)) for m in step.result_sends]
        self._blocks.post(sends, step.result_receives, step.index)

    def finish(self) -> None:
        assert not self._made, "every gradient of a foreign block has left"

    def _outgoing(self, move: Move) -> Tensor:
        """The message of gradients that leave: the buffer of sums itself, or a rounded copy if they travel narrow."""
        made = self._made.pop(move.owner)
        if not self._blocks.pass_plan.narrow:
            return made
        message = self._blocks.buffer(self._blocks.size(move))
        wide = self._blocks.views([move], made, wide=True)
        with self._blocks.copying():
            for rounded, total in zip(self._blocks.views([move], message), wide, strict=True):
                rounded.copy_(total)
        return message

    def _add(self, move: Move) -> None:
        """Add gradients that arrived to those of the same block here: our own, or some that are sent on."""
        came = self._blocks.views([move], self._blocks.take(move))
        if move.owner == self._blocks.rank:
            mine = tuple(rows_of(x, move.rows) for x in self._own)
        else:
            mine = self._blocks.views([self._sends[move.owner]], self._made[move.owner], wide=True)
        with self._blocks.copying():
            for total, contribution in zip(mine, came, strict=True):
                total += contribution


def rows_of(tensor: Tensor, rows: tuple[int, int]) -> Tensor:
    """Rows [start, stop) of ``[B, S, H, D]``, or of ``[B, H, S]``."""
    return tensor[:, rows[0] : rows[1]] if tensor.dim() == 4 else tensor[:, :, rows[0] : rows[1]]


def _view(field: Field, buffer: Tensor, start: int, rows: int, batch: int, dtype: torch.dtype) -> Tensor:
    """A view of a field that starts `start` bytes into each row of a message: ``[B, rows, H, D]`` or ``[B, H, rows]``.

    `dtype`: of the inputs.
    """
    kind = dtype if field.itemsize == dtype.itemsize else accumulation_dtype(dtype)
    numbers = buffer.view(kind)
    row, first = numbers.numel() // rows, numbers.storage_offset() + start // field.itemsize
    heads, dim = field.heads, field.dim
    if dim is None:
        return numbers.as_strided((batch, heads, rows), (heads, 1, row), first)
    return numbers.as_strided((batch, rows, heads, dim), (heads * dim, row, dim, 1), first)
