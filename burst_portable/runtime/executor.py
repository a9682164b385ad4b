"""Runs one rank's steps of a pass, whatever the strategy. (`head_parallel` brings resharded heads here, and home.)

::

    for each step:  what arrives   ->   send on, receive ahead   ->   compute   ->   gradients after their block

`planning.schedule.Step` says what each step holds, `planning.routes.Move` when a message leaves and when it is needed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from itertools import accumulate

import torch
from torch import Tensor

from burst_portable import numerics
from burst_portable import numerics as wide_copy
from burst_portable.comm.base import Handle, Message
from burst_portable.kernels.base import BackwardInputs, Gradients, Kernel, as_kernels_take
from burst_portable.numerics import State, accumulation_dtype, as_dtype, empty_state
from burst_portable.planning.call import AttentionCall
from burst_portable.planning.messages import Field, fields, local_block_size, message_size, needed_together, row_size
from burst_portable.planning.routes import Move, holder, to_pack
from burst_portable.planning.schedule import Step
from burst_portable.planning.tiles import Tiles
from burst_portable.runtime.prepared_call import Executor, PreparedCall

Views = tuple[Tensor, ...]
"""The tensors of a block: (k, v), (q, dO, LSE, delta), or gradients; over messages, or a rank's own."""


class StepExecutor(Executor):
    """Runs passes in which blocks travel and heads stay where they are."""

    def forward(
        self, prepared: PreparedCall, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, *, keep: bool
    ) -> tuple[Tensor, Tensor | None, tuple[Tensor, ...]]:
        out, lse = forward_rows(prepared, q, k, v, sinks)
        out = as_dtype(out, q.dtype)
        if keep:  # some kernels return views, which torch refuses to change in place
            out, lse = (x.detach() if x._is_view() else x for x in (out, lse))
        return out, lse if prepared.with_lse else None, (q, k, v, out, lse)

    def backward(
        self, prepared: PreparedCall, saved: Sequence[Tensor], sinks: Tensor | None, dout: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        q, k, v, out, lse = saved
        # Even if this rank's result was not used, other ranks wait for its part of the pass.
        dout = torch.zeros_like(out) if dout is None else as_kernels_take(dout)
        delta = None if sinks is None else prepared.kernel.row_delta(dout, out)
        dq, dk, dv = backward_rows(prepared, BackwardInputs(dout, q, k, v, lse, out, delta))
        dsinks = None if sinks is None or delta is None else numerics.sinks_gradient(sinks, lse, delta)
        return as_dtype(dq, q.dtype), as_dtype(dk, q.dtype), as_dtype(dv, q.dtype), dsinks


def forward_rows(prepared: PreparedCall, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> State:
    """Return (out, LSE) of the rows at hand.

    Args:
        prepared: The call.
        q: Queries of shape [B, S, Hq, D].
        k: Keys at hand, of shape [B, S', Hkv, D]; those of other ranks come as the plan says.
        v: Values at hand, of shape [B, S', Hkv, Dv].
        sinks: Logits of shape [Hq], or None.

    Returns:
        out of shape [B, S, Hq, Dv] in the dtype of q or wider; LSE of shape [B, Hq, S] in the accumulation dtype.
    """
    compute = prepared.plan.forward.alone(prepared.transport.rank) if sinks is None else None
    if compute:
        with prepared.observer.computes(compute, q, backward=False):
            state = prepared.kernel.forward_single_call(q, k, v, compute.tiles, prepared.call, yields=prepared.yields)
    else:
        state = _forward_steps(prepared, q, k, v, rounds=sinks is None)  # sinks are merged before out is rounded
    if sinks is not None:
        numerics.add_sinks(state, sinks)
    return state[0], as_dtype(state[1], accumulation_dtype(q.dtype))


def backward_rows(prepared: PreparedCall, x: BackwardInputs) -> Gradients:
    """Return (dq, dk, dv) of the rows at hand, in the dtype of q or the accumulation dtype.

    Args:
        prepared: The call.
        x: Tensors of the rows at hand, with `out`, and with `delta` if it has been computed already.
    """
    compute = prepared.plan.backward.alone(prepared.transport.rank)
    if compute:
        with prepared.observer.computes(compute, x.q, backward=True):
            return prepared.kernel.backward_single_call(x._replace(delta=None), compute.tiles, prepared.call)
    if prepared.by_out:
        return _backward_steps(prepared, x._replace(delta=None))
    assert x.out is not None, "it was kept"
    delta = prepared.kernel.row_delta(x.dout, x.out) if x.delta is None else x.delta
    return _backward_steps(prepared, x._replace(out=None, delta=delta))


def _forward_steps(prepared: PreparedCall, q: Tensor, k: Tensor, v: Tensor, *, rounds: bool) -> State:
    """Return (out, LSE) of this rank's queries, in the dtypes that the kernel keeps while it merges.

    rounds: Whether out may be in q's dtype. Rows that one step computes are then written in it at once::

        one computation                     all rows are rounded                                forward_single_call
        several, and few rows are merged    rows that are complete after the first are rounded  attend_first, attend
        several                             none: all are merged in the wider dtype             attend
    """
    kernel, call, pass_plan, rank = prepared.kernel, prepared.call, prepared.plan.forward, prepared.transport.rank
    steps = pass_plan.steps_of(rank)
    once = rounds and sum(step.compute is not None for step in steps) == 1
    merged = pass_plan.merged_rows(rank) if rounds and kernel.traits.writes_into else None
    first = None if merged is None else (merged, q.new_empty((*q.shape[:3], v.shape[-1])))
    blocks = _Blocks(prepared, (k, v), q.dtype, backward=False)
    state: State | None = None
    for step in steps:
        blocks.begin(step)
        if step.compute:
            keys, values = blocks.use(step)
            tiles, yields = step.compute.tiles, prepared.yields and blocks.moving(step.index)
            with prepared.observer.computes(step.compute, q, backward=False):
                if once:
                    state = kernel.forward_single_call(q, keys, values, tiles, call, yields=yields)
                elif state is None and first is not None:
                    state = attend_first(kernel, q, keys, values, tiles, call, *first, yields=yields)
                else:
                    state = kernel.attend(q, keys, values, tiles, call, state=state, yields=yields)
        blocks.end(step)
    blocks.finish()
    if state is None:
        return empty_state(q, v.shape[-1])
    if first is None:
        return state
    merged, out = first
    rows_of(out, merged).copy_(rows_of(state[0], merged))
    return out, state[1]


def attend_first(
    kernel: Kernel,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    tiles: Tiles,
    call: AttentionCall,
    merged: tuple[int, int],
    out: Tensor,
    *,
    yields: bool = False,
) -> State:
    """Run the first of several launches, of which later ones merge into rows [start, stop) alone.

    Args:
        kernel: A kernel whose `traits.writes_into` is set.
        q: Queries of shape [B, Sq, Hq, D].
        k: Keys of shape [B, Sk, Hkv, D].
        v: Values of shape [B, Sk, Hkv, Dv].
        tiles: Visible pairs, in local indices.
        call: The settings.
        merged: These rows.
        out: [B, Sq, Hq, Dv] in the dtype of q; all other rows are written there.
        yields: As for `Kernel.attend`.

    Returns:
        The state for later launches: LSE of all rows, out of the merged ones; the rest of it is not set.
    """
    start, stop = merged
    batch, rows, heads, _ = q.shape
    wide = torch.empty(out.shape, dtype=accumulation_dtype(q.dtype), device=q.device)
    lse = torch.empty((batch, heads, rows), dtype=wide.dtype, device=q.device)
    for first, past, into in ((0, start, out), (start, stop, wide), (stop, rows, out)):
        if first < past:
            part, some = slice(first, past), tiles.in_rows(first, past)
            kernel.attend_into(q[:, part], k, v, some, call, into[:, part], lse[:, :, part], yields=yields)
    return wide, lse


def _backward_steps(prepared: PreparedCall, x: BackwardInputs) -> Gradients:
    """Return (dq, dk, dv) of this rank's shard, in the accumulation dtype. Where queries travel, delta is given."""
    kernel, call, pass_plan = prepared.kernel, prepared.call, prepared.plan.backward
    own = (x.q, x.k, x.v)
    dq, dk, dv = (torch.zeros(t.shape, dtype=accumulation_dtype(t.dtype), device=t.device) for t in own)
    travels_kv = pass_plan.side == "kv"
    own_block, own_gradients = ((x.k, x.v), (dk, dv)) if travels_kv else (_travelling(x), (dq,))
    blocks = _Blocks(prepared, own_block, x.q.dtype, backward=True)
    results = _Results(blocks, own_gradients)
    for step in pass_plan.steps_of(prepared.transport.rank):
        blocks.begin(step)
        if compute := step.compute:
            block, sums = blocks.use(step), results.accumulators(step)
            if travels_kv:
                (k, v), (dk_sum, dv_sum) = block, sums
                inputs, into = x._replace(k=k, v=v), (dq, dk_sum, dv_sum)
            else:
                (q, dout, lse, delta), (dq_sum,) = block, sums
                inputs, into = x._replace(dout=dout, q=q, lse=lse, delta=delta), (dq_sum, dk, dv)
            with prepared.observer.computes(compute, x.k, backward=True):
                kernel.attend_backward(inputs, compute.tiles, call, into=into)
        results.end(step)
        blocks.end(step)
    results.finish()
    blocks.finish()
    return dq, dk, dv


def _travelling(x: BackwardInputs) -> Views:
    """Return the tensors of a rank's queries, as they travel backward."""
    assert x.delta is not None, "delta travels with queries, out does not"
    return x.q, x.dout, x.lse, x.delta


class _Blocks:
    """The blocks of one pass: this rank's own, and foreign ones that are here or on their way.

    Blocks that one step needs arrive in one buffer, one after the other, so that the kernel reads them as one.
    """

    def __init__(self, prepared: PreparedCall, own: Views, dtype: torch.dtype, *, backward: bool) -> None:
        self.pass_plan = prepared.plan.backward if backward else prepared.plan.forward
        self.rank, self.transport, self.backward = prepared.transport.rank, prepared.transport, backward
        self._places, self._observer = prepared.places, prepared.observer
        self._own, self.dtype, self.device = own, dtype, own[0].device
        self._arriving: dict[Move, tuple[Handle, Tensor]] = {}
        self._held: dict[int, Tensor] = {}
        self._inbox_of: dict[int, Tensor] = {}  # by step: the buffer of all blocks that it needs
        self._packed: dict[tuple[int, int], Tensor] = {}  # by rows: messages of our own block
        self._leaving: list[tuple[int, Handle, Tensor]] = []  # (step that needs it where it goes, handle, message)
        self._step = 0
        joining = [step.index for step in self.pass_plan.steps_of(self.rank) if step.joins_local]
        self._local = local_block_size(self.pass_plan, self.rank) if joining else 0
        self._joining = frozenset(joining)

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
        inbox = self._inbox_of[step.index]
        if step.joins_local:
            with self.copying():
                for view, tensor in zip(self.views(step.arrivals, inbox[-self._local :]), self._own, strict=True):
                    wide_copy.copy(tensor, view)
        views = self.views(step.arrivals, inbox)
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
        out = [Message(buffer, move.target, self._places.get(move)) for move, buffer in sends]
        back = [Message(buffer, move.source, self._places.get(move)) for move, buffer in incoming]
        with self._observer.posts(sends, incoming, step, backward=self.backward) as posting:
            label = f"{'backward' if self.backward else 'forward'} step {step}"
            leaving, arriving = self.transport.post(out, back, label)
        leaving, arriving = posting.wrap(leaving, arriving)
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
        return self._observer.copies(self.device, self._step, backward=self.backward)

    def buffer(self, size: int) -> Tensor:
        """An empty buffer for messages."""
        return self.transport.buffer(size, self.device)

    def size(self, move: Move) -> int:
        """Bytes of a move."""
        return message_size(self.pass_plan.call, move, narrow=self.pass_plan.narrow)

    def _inboxes(self, moves: list[Move]) -> Iterator[tuple[Move, Tensor]]:
        """Moves that are needed together, each with its part of one buffer for all of them."""
        sizes = [self.size(move) for move in moves]
        first = moves[0]
        # Behind blocks with which a launch takes the rank's own, there is room for that.
        room = [self._local] if not first.result and first.needed in self._joining else []
        inbox = self.transport.inbox(sum(sizes) + sum(room), self.device, first.source, self._places.get(first))
        if not first.result:
            self._inbox_of[first.needed] = inbox
        parts = torch.split(inbox, sizes + room) if len(sizes + room) > 1 else (inbox,)
        yield from zip(moves, parts, strict=False)

    def views(self, moves: Sequence[Move], buffer: Tensor, *, wide: bool = False) -> Views:
        """The fields of messages like these that fill a buffer, each field as one tensor over all rows.

        wide: whether gradients are in the accumulation dtype although they travel narrow.
        """
        call, first = self.pass_plan.call, moves[0]
        held = fields(call, first.side, result=first.result, narrow=self.pass_plan.narrow and not wide)
        *starts, row = accumulate((field.size(call.batch) for field in held), initial=0)
        rows = buffer.numel() // row
        return tuple(_view(f, buffer, at, rows, call.batch, self.dtype) for f, at in zip(held, starts, strict=True))

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
        self._joined: Views = ()  # sums of our own block that a launch made together with others
        results = [m for step in blocks.pass_plan.steps_of(blocks.rank) for m in step.result_sends]
        self._sends = {m.owner: m for m in results}

    def accumulators(self, step: Step) -> Views:
        """The buffers to which the kernel adds a step's gradients: our own sums, or fresh zeros for foreign blocks."""
        if not step.arrivals:
            return self._own
        moves = [self._sends[move.owner] for move in step.arrivals]
        call = self._blocks.pass_plan.call
        sizes = [message_size(call, move, narrow=False) for move in moves]
        if step.joins_local:
            sizes.append(self._own[0].shape[1] * row_size(call, moves[0].side, result=True))
        sums = self._blocks.buffer(sum(sizes))
        with self._blocks.copying():
            sums.zero_()
        parts = torch.split(sums, sizes)
        self._made.update(zip((move.owner for move in moves), parts, strict=False))
        self._joined = self._blocks.views(moves, parts[-1], wide=True) if step.joins_local else ()
        return self._blocks.views(moves, sums, wide=True)

    def end(self, step: Step) -> None:
        """Add gradients that arrived, and those of our own block; send on those that are complete here."""
        if self._joined:
            with self._blocks.copying():
                for total, contribution in zip(self._own, self._joined, strict=True):
                    total += contribution
            self._joined = ()
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
