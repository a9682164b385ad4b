"""Define `Blocks`: the blocks that one rank holds during a pass, and the messages that bring them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from burst_portable.comm.base import Handle, Message
from burst_portable.planning.messages import Arrivals, PassMessages, RowLayout, StepMessages
from burst_portable.planning.routes import Move, Rows, Side
from burst_portable.planning.schedule import Step
from burst_portable.runtime.message_views import Views, copy_rows, message_views
from burst_portable.runtime.prepared_call import PreparedCall


class Blocks:
    """The blocks of one pass: the local block, and remote blocks that have arrived or are in flight.

    Blocks that one step needs are contiguous in one buffer, so that the kernel reads them as one block. A step calls
    `begin`, `use` and `end`. `HelperResults` and `BlockGradients` send results with the other methods.
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
        self.rank, self.side = prepared.transport.rank, (prepared.backward if backward else prepared.forward).plan.side
        self.pass_messages = messages
        self._transport, self._observer, self._backward = prepared.transport, prepared.observer, backward
        rounds = prepared.offsets.get("backward" if backward else "forward")
        self._offsets = rounds[round_index] if rounds else {}  # empty if senders do not write into inboxes
        self._local, self._device = local, local[self.side][0].device
        self._batch, self._dtype = prepared.kernel_call.batch, dtype
        self._receives: dict[Move, tuple[Handle, Tensor]] = {}
        self._remote: dict[int, Tensor] = {}  # by owner: blocks that have arrived
        self._block_buffers: dict[int, Tensor] = {}  # by step: buffer of all blocks that it needs
        self._packed: dict[tuple[Side, Rows], Tensor] = {}  # messages of the local block
        self._sends: list[tuple[int, Handle, Tensor]] = []  # (step at which the receiver needs it, handle, message)
        self._step = 0

    def begin(self, step: Step, messages: StepMessages) -> None:
        """Wait for the blocks of this step. Send blocks, and post receives for later steps."""
        self._step = step.index
        for move in step.arrivals:
            self._remote[move.owner] = self.take(move)
        for side, rows, size in messages.packs:  # each row is packed once: a message may be part of another one
            packed = self._packed[side, rows] = self.buffer(size)
            self.copy(self._local[side], self.pass_messages.inputs[side], packed, rows)
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
        received, layout = self._block_buffers[step.index], self.pass_messages.inputs[side]
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
        outgoing = [Message(buffer, move.target, self._offsets.get(move)) for move, buffer in sends]
        expected = [Message(buffer, move.source, self._offsets.get(move)) for move, buffer in incoming]
        with self._observer.posts(sends, incoming, self._step, backward=self._backward) as posting:
            label = f"{'backward' if self._backward else 'forward'} step {self._step}"
            send_handles, receive_handles = self._transport.post(outgoing, expected, label)
        send_handles, receive_handles = posting.wrap(send_handles, receive_handles)
        for handle, (move, buffer) in zip(send_handles, sends, strict=True):
            self._sends.append((move.wait_step, handle, buffer))
        for handle, (move, buffer) in zip(receive_handles, incoming, strict=True):
            self._receives[move] = handle, buffer

    def take(self, move: Move) -> Tensor:
        """Wait for the message of a move that has been posted."""
        handle, buffer = self._receives.pop(move)
        handle.wait()
        return buffer

    def copies(self) -> AbstractContextManager[object]:
        """Return a context around the copies of a step, for the profiler."""
        return self._observer.copies(self._device, self._step, backward=self._backward)

    def buffer(self, size: int) -> Tensor:
        """Return an empty buffer for messages."""
        return self._transport.buffer(size, self._device)

    def views(self, layout: RowLayout, buffer: Tensor) -> Views:
        """Return the tensors of contiguous messages in a buffer: see `message_views`."""
        return message_views(layout, buffer, self._batch, self._dtype)

    def copy(self, tensors: Sequence[Tensor], layout: RowLayout, buffer: Tensor, rows: Rows | None = None) -> None:
        """Copy these rows of the tensors of a block, or of its results, into a message. Default: all rows."""
        with self.copies():
            copy_rows(tensors, self.views(layout, buffer), rows)

    def _wait_sent(self, step: int) -> None:
        """Wait for sends that their receivers need by this step. Later ones may still be crossing to another node."""
        for wait_step, handle, _ in self._sends:
            if wait_step <= step:
                handle.wait()
        self._sends = [send for send in self._sends if send[0] > step]

    def _receive_buffers(self, arrivals: Arrivals) -> Iterable[tuple[Move, Tensor]]:
        """Return moves for which one step waits, each with its part of one buffer for all of them."""
        moves, sizes = arrivals
        first = moves[0]
        buffer = self._transport.receive_buffer(sum(sizes), self._device, first.source, self._offsets.get(first))
        if not first.is_result:
            self._block_buffers[first.wait_step] = buffer
        return zip(moves, torch.split(buffer, list(sizes)) if len(sizes) > 1 else (buffer,), strict=False)
