"""Execute the steps of one rank, for all strategies but `ring_self_attention` (`score_rows`).

`head_groups` runs them for one group of heads after the other. `head_parallel` exchanges tokens for heads before and
after them.

One pass, as `forward_rows` and `backward_rows` run it::

    for step in steps:                  planning/schedule.py, Step: what this rank does at each step
        Blocks.begin                    wait for the blocks of this step; send blocks; post receives for later steps
        kernel.attend                   compute with the local and the received blocks (attend_backward in backward)
        BlockGradients.end              backward: add received gradients, send the sums of remote blocks
        _Partials.end                   forward: merge the results of helpers, send results for remote queries
        Blocks.end                      release blocks that no later step uses

`planning.messages.StepMessages` has the sizes of the messages of a step.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from burst_portable import numerics
from burst_portable.comm.base import Handle, Message
from burst_portable.errors import BackendUnavailableError
from burst_portable.kernels.base import BackwardInputs, Gradients, Kernel, as_kernels_take
from burst_portable.numerics import State, accumulation_dtype, as_dtype, empty_state
from burst_portable.planning.call import AttentionCall
from burst_portable.planning.messages import Arrivals, PassMessages, RowLayout, StepMessages
from burst_portable.planning.routes import Move, Rows, Side
from burst_portable.planning.schedule import Step
from burst_portable.planning.tiles import Tiles
from burst_portable.runtime.prepared_call import Executor, PreparedCall

Views = tuple[Tensor, ...]
"""The tensors of a block: (k, v), (q,), (q, dO, LSE, delta), or results. Views of a message, or local tensors."""


class StepExecutor(Executor):
    """Run passes that send blocks of the sequence and do not divide heads."""

    def forward(
        self, prepared: PreparedCall, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, *, keep: bool
    ) -> tuple[Tensor, Tensor | None, tuple[Tensor, ...]]:
        out, lse = forward_rows(prepared, q, k, v, sinks)
        if out.dtype is not q.dtype:
            out = out.to(q.dtype)
        if keep and out._is_view():  # torch raises an error if a view is changed in place
            out = out.detach()
        if keep and lse._is_view():
            lse = lse.detach()
        return out, lse if prepared.with_lse else None, (q, k, v, out, lse)

    def backward(
        self, prepared: PreparedCall, saved: Sequence[Tensor], sinks: Tensor | None, dout: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        q, k, v, out, lse = saved
        # Other ranks wait for this rank's part of the pass, even if its result was not used.
        if dout is None:
            dout = torch.zeros_like(out)
        elif type(dout) is not Tensor or dout.stride(-1) != 1 or dout.is_neg():
            dout = as_kernels_take(dout)
        delta = None if sinks is None else prepared.kernel.row_delta(dout, out)
        dq, dk, dv = backward_rows(prepared, BackwardInputs(dout, q, k, v, lse, out, delta))
        dsinks = None if sinks is None or delta is None else numerics.sinks_gradient(sinks, lse, delta)
        return as_dtype(dq, q.dtype), as_dtype(dk, q.dtype), as_dtype(dv, q.dtype), dsinks


def forward_rows(prepared: PreparedCall, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> State:
    """Return (out, LSE) of the local rows: out in the dtype of q or wider, LSE in the accumulation dtype.

    `k` and `v` are local. The plan brings those of other ranks.
    """
    compute = prepared.forward.single
    if compute is not None and sinks is None:
        with prepared.observer.computes(compute, q, backward=False):
            state = prepared.kernel.forward_single_call(
                q, k, v, compute.tiles, prepared.kernel_call, yields_to_comm=prepared.yields_to_comm
            )
    else:
        # Sinks are merged before out is rounded.
        steps = ForwardSteps(prepared, q, k, v, may_round=sinks is None)
        for step, step_messages in prepared.forward.messages.steps:
            steps.run(step, step_messages)
        state = steps.finish()
    if sinks is not None:
        numerics.add_sinks(state, sinks)
    out, lse = state
    return out, lse if lse.dtype is torch.float32 else as_dtype(lse, accumulation_dtype(q.dtype))


def backward_rows(prepared: PreparedCall, x: BackwardInputs) -> Gradients:
    """Return (dq, dk, dv) of the local rows, in the dtype of q or the accumulation dtype.

    `x` has `out`, and `delta` if it has been computed already.
    """
    compute = prepared.backward.single
    if compute is not None:
        with prepared.observer.computes(compute, x.q, backward=True):
            x = x if x.delta is None else x._replace(delta=None)
            return prepared.kernel.backward_single_call(x, compute.tiles, prepared.kernel_call)
    if prepared.backward_takes_out:
        x = x._replace(delta=None)
    else:
        assert x.out is not None, "forward saved it"
        delta = prepared.kernel.row_delta(x.dout, x.out) if x.delta is None else x.delta
        x = x._replace(out=None, delta=delta)
    steps = BackwardSteps(prepared, x)
    for step, step_messages in prepared.backward.messages.steps:
        steps.run(step, step_messages)
    return steps.finish()


class ForwardSteps:
    """The steps of one rank in a forward pass, for one group of heads: round `round_index` of `Plan.rounds`.

    The result is (out, LSE) of this rank's queries, in the dtypes that the kernel keeps while it merges. If
    `may_round`, out may have the dtype of q. Rows that only one step computes are then written in it directly::

        one computation                     all rows                                 forward_single_call
        several, and few rows are merged    rows that the first one completes        attend_first, attend
        several                             none: all are merged in the wider dtype  attend
    """

    def __init__(
        self, prepared: PreparedCall, q: Tensor, k: Tensor, v: Tensor, *, may_round: bool, round_index: int = 0
    ) -> None:
        self._prepared, self._q, self._k, self._v = prepared, q, k, v
        self._computes_once = may_round and prepared.forward.messages.parts == 1
        merges_few = may_round and prepared.kernel.traits.writes_into
        merged = prepared.forward.plan.merged_rows(prepared.transport.rank) if merges_few else None
        self._rounded = None if merged is None else (merged, q.new_empty((*q.shape[:3], v.shape[-1])))
        messages = prepared.forward.messages
        self._blocks = Blocks(prepared, messages, {"kv": (k, v), "q": (q,)}, q.dtype, round_index, backward=False)
        self._partials = _Partials(self._blocks)
        self._state: State | None = None

    def run(self, step: Step, messages: StepMessages) -> None:
        """Run the next step."""
        prepared, blocks, q = self._prepared, self._blocks, self._q
        kernel, call = prepared.kernel, prepared.kernel_call
        blocks.begin(step, messages)
        if step.compute:
            block = blocks.use(step, messages)
            helps = messages.side == "q"  # remote queries with the local keys
            k, v = (self._k, self._v) if helps else block
            tiles, yields_to_comm = step.compute.tiles, prepared.yields_to_comm and blocks.is_communicating(step.index)
            with prepared.observer.computes(step.compute, q, backward=False):
                if helps:
                    part = kernel.attend(block[0], k, v, tiles, call, yields_to_comm=yields_to_comm)
                    self._partials.keep(step, part)
                elif self._computes_once:
                    self._state = kernel.forward_single_call(q, k, v, tiles, call, yields_to_comm=yields_to_comm)
                elif self._state is None and (rounded := self._rounded) is not None:
                    self._state = attend_first(kernel, q, k, v, tiles, call, *rounded, yields_to_comm=yields_to_comm)
                else:
                    self._state = kernel.attend(q, k, v, tiles, call, state=self._state, yields_to_comm=yields_to_comm)
            if self._state is None and not helps:  # `finish` would return fully masked rows
                raise BackendUnavailableError(f"the kernel {kernel.name!r} is broken: attend returned None")
        self._partials.end(step, messages, self._state)
        blocks.end(step)

    def finish(self) -> State:
        """Return (out, LSE) after all steps."""
        self._blocks.finish()
        state = empty_state(self._q, self._v.shape[-1]) if self._state is None else self._state
        self._partials.finish(state)
        if self._state is None or self._rounded is None:
            return state
        rows, out = self._rounded
        rows_of(out, rows).copy_(rows_of(state[0], rows))
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
    yields_to_comm: bool = False,
) -> State:
    """Run the first of several launches, if the later ones merge only into the rows `merged`, [start, stop).

    All other rows are written into `out`, of shape [B, Sq, Hq, Dv] in the dtype of q. Return the state for later
    launches: LSE of all rows, and out of the merged rows. `kernel.traits.writes_into` must be set.
    """
    start, stop = merged
    batch, rows, heads, _ = q.shape
    wide = torch.empty(out.shape, dtype=accumulation_dtype(q.dtype), device=q.device)
    lse = torch.empty((batch, heads, rows), dtype=wide.dtype, device=q.device)
    for first, past, into in ((0, start, out), (start, stop, wide), (stop, rows, out)):
        if first < past:
            part, some = slice(first, past), tiles.in_rows(first, past)
            kernel.attend_into(
                q[:, part], k, v, some, call, into[:, part], lse[:, :, part], yields_to_comm=yields_to_comm
            )
    return wide, lse


class BackwardSteps:
    """The steps of one rank in a backward pass, for one group of heads: round `round_index` of `Plan.rounds`.

    The result is (dq, dk, dv) of this rank's shard, in the accumulation dtype. If queries are sent, `x` has delta.
    """

    def __init__(self, prepared: PreparedCall, x: BackwardInputs, round_index: int = 0) -> None:
        self._prepared, self._x = prepared, x
        dq, dk, dv = (torch.zeros(t.shape, dtype=accumulation_dtype(t.dtype), device=t.device) for t in (x.q, x.k, x.v))
        self._results: Gradients = dq, dk, dv
        sides = prepared.backward.plan.sides
        local = {side: (x.k, x.v) if side == "kv" else _query_block(x) for side in sides}
        self._blocks = Blocks(prepared, prepared.backward.messages, local, x.q.dtype, round_index, backward=True)
        self._gradients = BlockGradients(self._blocks, {"kv": (dk, dv), "q": (dq,)})

    def run(self, step: Step, messages: StepMessages) -> None:
        """Run the next step."""
        prepared, x, blocks, gradients = self._prepared, self._x, self._blocks, self._gradients
        dq, dk, dv = self._results
        blocks.begin(step, messages)
        if compute := step.compute:
            block, sums = blocks.use(step, messages), gradients.accumulators(step, messages)
            if (messages.side or blocks.side) == "kv":
                (k, v), (dk_sum, dv_sum) = block, sums
                inputs, into = x._replace(k=k, v=v), (dq, dk_sum, dv_sum)
            else:
                (q, dout, lse, delta), (dq_sum,) = block, sums
                inputs, into = x._replace(dout=dout, q=q, lse=lse, delta=delta), (dq_sum, dk, dv)
            with prepared.observer.computes(compute, x.k, backward=True):
                prepared.kernel.attend_backward(inputs, compute.tiles, prepared.kernel_call, into=into)
        gradients.end(step, messages)
        blocks.end(step)

    def finish(self) -> Gradients:
        """Return (dq, dk, dv) after all steps."""
        self._gradients.finish()
        self._blocks.finish()
        return self._results


def _query_block(x: BackwardInputs) -> Views:
    """Return the tensors of a block of queries in the backward pass."""
    assert x.delta is not None, "queries are sent with delta instead of out"
    return x.q, x.dout, x.lse, x.delta


class Blocks:
    """The blocks of one pass: the local block, and remote blocks that have arrived or are in flight.

    Blocks that one step needs are contiguous in one buffer, so that the kernel reads them as one block.
    """

    def __init__(
        self,
        prepared: PreparedCall,
        messages: PassMessages,
        local: dict[Side, Views],
        dtype: torch.dtype,
        round_index: int,
        *,
        backward: bool,
    ) -> None:
        self.transport, self.rank, self.backward = prepared.transport, prepared.transport.rank, backward
        self.messages, self.batch = messages, prepared.kernel_call.batch
        self.side = (prepared.backward if backward else prepared.forward).plan.side
        rounds = prepared.offsets.get("backward" if backward else "forward")
        self._offsets = rounds[round_index] if rounds else {}
        self.observer = prepared.observer
        self._local, self.dtype, self.device = local, dtype, local[self.side][0].device
        self._receives: dict[Move, tuple[Handle, Tensor]] = {}
        self._remote: dict[int, Tensor] = {}  # by owner: blocks that have arrived
        self._block_buffers: dict[int, Tensor] = {}  # by step: buffer of all blocks that it needs
        self._packed: dict[tuple[Side, Rows], Tensor] = {}  # messages of the local block
        self._sends: list[tuple[int, Handle, Tensor]] = []  # (step at which the receiver needs it, handle, message)
        self.step = 0

    def begin(self, step: Step, messages: StepMessages) -> None:
        """Wait for the blocks of this step. Send blocks, and post receives for later steps."""
        self.step = step.index
        for move in step.arrivals:
            self._remote[move.owner] = self.take(move)
        for side, rows, size in messages.packs:  # each row is packed once: a message may be part of another one
            packed = self._packed[side, rows] = self.buffer(size)
            self.copy(self._local[side], self.messages.inputs[side], packed, rows)
        sends = []
        for move, packed_rows, start, stop in messages.sends:
            buffer = (
                self._remote[move.owner] if packed_rows is None else self._packed[move.side, packed_rows][start:stop]
            )
            sends.append((move, buffer))
        if sends or messages.receives:
            self.post(sends, messages.receives)

    def use(self, step: Step, messages: StepMessages) -> Views:
        """Return the tensors of the sent side with which a step computes."""
        side = messages.side
        if side is None:
            return self._local[self.side]
        received, layout = self._block_buffers[step.index], self.messages.inputs[side]
        if messages.local:  # behind the blocks with which one launch takes it
            self.copy(self._local[side], layout, received[-messages.local :])
        views = self.views(layout, received)
        # Kernels require contiguous LSE and delta.
        return views if len(views) <= 2 else (*views[:2], *(x.contiguous() for x in views[2:]))

    def is_communicating(self, step: int) -> bool:
        """Return whether messages that later steps need are in flight during this step."""
        return bool(self._receives) or any(wait_step > step for wait_step, _, _ in self._sends)

    def end(self, step: Step) -> None:
        """Release blocks that no later step uses, and sent messages that their receivers need at this step."""
        if self._sends:
            self._wait_sent(step.index)
        self._block_buffers.pop(step.index, None)
        for owner in step.released:
            del self._remote[owner]

    def finish(self) -> None:
        """Wait until all sends are complete."""
        if self._sends:
            self._wait_sent(max(wait_step for wait_step, _, _ in self._sends))
        assert not self._remote, "the plan releases every block"
        assert not self._receives, "the plan waits for every move"

    def post(self, sends: list[tuple[Move, Tensor]], receives: Sequence[Arrivals]) -> None:
        """Start the messages of one step."""
        incoming: list[tuple[Move, Tensor]] = []
        for arrivals in receives:
            incoming += self._receive_buffers(arrivals)
        outgoing = [Message(buffer, move.target, self._offset(move)) for move, buffer in sends]
        expected = [Message(buffer, move.source, self._offset(move)) for move, buffer in incoming]
        with self.observer.posts(sends, incoming, self.step, backward=self.backward) as posting:
            label = f"{'backward' if self.backward else 'forward'} step {self.step}"
            send_handles, receive_handles = self.transport.post(outgoing, expected, label)
        send_handles, receive_handles = posting.wrap(send_handles, receive_handles)
        for handle, (move, buffer) in zip(send_handles, sends, strict=True):
            self._sends.append((move.wait_step, handle, buffer))
        for handle, (move, buffer) in zip(receive_handles, incoming, strict=True):
            self._receives[move] = handle, buffer

    def _offset(self, move: Move) -> int | None:
        """Return the offset of a message in its receiver's inbox; None if senders do not write there."""
        return self._offsets.get(move)

    def _wait_sent(self, step: int) -> None:
        """Wait for sends that their receivers need by this step. Later ones may still be crossing to another node."""
        for wait_step, handle, _ in self._sends:
            if wait_step <= step:
                handle.wait()
        self._sends = [send for send in self._sends if send[0] > step]

    def take(self, move: Move) -> Tensor:
        """Wait for the message of a move that has been posted."""
        handle, buffer = self._receives.pop(move)
        handle.wait()
        return buffer

    def copies(self) -> AbstractContextManager[object]:
        """Return a context around the copies of a step, for the profiler."""
        return self.observer.copies(self.device, self.step, backward=self.backward)

    def buffer(self, size: int) -> Tensor:
        """Return an empty buffer for messages."""
        return self.transport.buffer(size, self.device)

    def _receive_buffers(self, arrivals: Arrivals) -> Iterable[tuple[Move, Tensor]]:
        """Return moves for which one step waits, each with its part of one buffer for all of them."""
        moves, sizes = arrivals
        first = moves[0]
        buffer = self.transport.receive_buffer(sum(sizes), self.device, first.source, self._offset(first))
        if not first.is_result:
            self._block_buffers[first.wait_step] = buffer
        return zip(moves, torch.split(buffer, list(sizes)) if len(sizes) > 1 else (buffer,), strict=False)

    def views(self, layout: RowLayout, buffer: Tensor) -> Views:
        """Return the fields of contiguous messages in a buffer, each over all rows.

        A field is [B, rows, H, D], or [B, H, rows] if it holds one number per row and head.
        """
        views, batch, dtype = [], self.batch, self.dtype
        rows = buffer.numel() // layout.size
        for field, start in layout.fields:
            numbers = buffer.view(dtype if field.itemsize == dtype.itemsize else accumulation_dtype(dtype))
            row, first = layout.size // field.itemsize, numbers.storage_offset() + start // field.itemsize
            heads, dim = field.heads, field.dim
            if dim is None:
                views.append(numbers.as_strided((batch, heads, rows), (heads, 1, row), first))
            else:
                views.append(numbers.as_strided((batch, rows, heads, dim), (heads * dim, row, dim, 1), first))
        return tuple(views)

    def copy(self, tensors: Sequence[Tensor], layout: RowLayout, buffer: Tensor, rows: Rows | None = None) -> None:
        """Copy these rows of the tensors of a block, or of its results, into a message. Default: all rows."""
        with self.copies():
            for view, tensor in zip(self.views(layout, buffer), tensors, strict=True):
                if rows is not None and len(rows) > 1:
                    for needed, place in _in_message(rows):
                        numerics.copy(rows_of(tensor, needed), rows_of(view, place))
                else:
                    numerics.copy(tensor if rows is None else rows_of(tensor, rows[0]), view)


class _Partials:
    """Results of helpers in a forward pass: (out, LSE) of remote queries, and those that arrive for local queries."""

    def __init__(self, blocks: Blocks) -> None:
        self._blocks = blocks
        self._computed: dict[int, State] = {}  # by owner of the queries: results that have not been sent
        self._arrived: list[tuple[Move, Tensor]] = []  # that have not been merged

    def keep(self, step: Step, state: State) -> None:
        """Keep the result of a launch with the queries that arrived for this step, until it is sent."""
        start = 0
        for move in step.arrivals:
            stop = start + move.num_rows
            self._computed[move.owner] = state[0][:, start:stop], state[1][:, :, start:stop]
            start = stop

    def end(self, step: Step, messages: StepMessages, state: State | None) -> None:
        """Merge results that arrived into the state, if there is one. Send the results of this step."""
        self._arrived += [(move, self._blocks.take(move)) for move in step.result_arrivals]
        if state is not None and self._arrived:
            self._merge(state)
        if messages.result_sends or messages.result_receives:
            sends = [(move, self._message(move, size)) for move, size in messages.result_sends]
            self._blocks.post(sends, messages.result_receives)

    def finish(self, state: State) -> None:
        """Merge the remaining results. Check that all results for other ranks were sent."""
        self._merge(state)
        assert not self._computed, "the plan returns every result of a helper"

    def _message(self, move: Move, size: int) -> Tensor:
        buffer = self._blocks.buffer(size)
        self._blocks.copy(self._computed.pop(move.owner), self._blocks.messages.results["q"], buffer)
        return buffer

    def _merge(self, state: State) -> None:
        for move, buffer in self._arrived:
            with self._blocks.copies():
                out, lse = self._blocks.views(self._blocks.messages.results["q"], buffer)
                for needed, place in _in_message(move.rows):
                    numerics.merge_rows(state, slice(*needed), rows_of(out, place), rows_of(lse, place))
        self._arrived = []


class BlockGradients:
    """Gradients of the sent side: of the local block, and of remote blocks until they are sent."""

    def __init__(self, blocks: Blocks, local: dict[Side, Views]) -> None:
        self._blocks, self._local = blocks, local
        self._sums: dict[int, Tensor] = {}  # by owner: sums that have not been sent
        # The layouts, not their sizes: fields of at most 16 bytes in both dtypes are padded to equal sizes.
        self._rounds = blocks.messages.results[blocks.side] != blocks.messages.sums[blocks.side]
        self._joined: Views = ()  # sums of the local block from a launch that also took remote blocks

    def accumulators(self, step: Step, messages: StepMessages) -> Views:
        """Return the buffers to which the kernel adds: the local sums, or zeros for remote blocks."""
        side = messages.side
        if side is None:
            return self._local[self._blocks.side]
        sums = self._blocks.buffer(sum(messages.sums))
        with self._blocks.copies():
            sums.zero_()
        layout, parts = self._blocks.messages.sums[side], torch.split(sums, list(messages.sums))
        self._sums.update(zip((move.owner for move in step.arrivals), parts, strict=False))
        self._joined = self._blocks.views(layout, parts[-1]) if messages.local else ()
        return self._blocks.views(layout, sums)

    def end(self, step: Step, messages: StepMessages) -> None:
        """Add gradients that arrived, and those of the local block. Send the sums that are complete on this rank."""
        if self._joined:
            self._add(self._local[self._blocks.side], self._joined)
            self._joined = ()
        for move in step.result_arrivals:
            self._receive(move)
        sends = [(move, self._message(move, size)) for move, size in messages.result_sends]
        if sends or messages.result_receives:
            self._blocks.post(sends, messages.result_receives)

    def finish(self) -> None:
        """Check that all gradients of remote blocks were sent."""
        assert not self._sums, "the plan sends every gradient of a remote block"

    def _message(self, move: Move, size: int) -> Tensor:
        """Return the message of gradients to send: the sums themselves, or a rounded copy."""
        blocks, sums = self._blocks, self._sums.pop(move.owner)
        if not self._rounds:
            return sums
        message, wide = blocks.buffer(size), blocks.views(blocks.messages.sums[move.side], sums)
        with blocks.copies():
            for rounded, total in zip(blocks.views(blocks.messages.results[move.side], message), wide, strict=True):
                rounded.copy_(total)
        return message

    def _receive(self, move: Move) -> None:
        """Add gradients that arrived to the sums of the same block on this rank."""
        blocks = self._blocks
        received = blocks.views(blocks.messages.results[move.side], blocks.take(move))
        if move.owner != blocks.rank:
            self._add(blocks.views(blocks.messages.sums[move.side], self._sums[move.owner]), received)
            return
        for needed, place in _in_message(move.rows):
            local = tuple(rows_of(x, needed) for x in self._local[move.side])
            self._add(local, tuple(rows_of(x, place) for x in received))

    def _add(self, sums: Views, contributions: Views) -> None:
        with self._blocks.copies():
            for total, contribution in zip(sums, contributions, strict=True):
                total += contribution


def _in_message(rows: Rows) -> Iterator[tuple[tuple[int, int], tuple[int, int]]]:
    """Yield each range of rows of a block, and the range of rows of its message that it takes."""
    start = 0
    for first, past in rows:
        yield (first, past), (start, start + past - first)
        start += past - first


def rows_of(tensor: Tensor, rows: tuple[int, int]) -> Tensor:
    """Return rows [start, stop) of a tensor of shape [B, S, H, D] or [B, H, S]."""
    return tensor[:, rows[0] : rows[1]] if tensor.dim() == 4 else tensor[:, :, rows[0] : rows[1]]
