"""Define `BlockGradients`: the gradients of blocks, which ranks sum and send in a backward pass."""

from __future__ import annotations

import torch
from torch import Tensor

from burst_portable.planning.messages import StepMessages
from burst_portable.planning.routes import Move, Side
from burst_portable.planning.schedule import Step
from burst_portable.runtime.blocks import Blocks
from burst_portable.runtime.message_views import Views, ranges_in_message, rows_of


class BlockGradients:
    """Gradients of the sent side: of the local block, and of remote blocks until they are sent."""

    def __init__(self, blocks: Blocks, local: dict[Side, Views]) -> None:
        self._blocks, self._local = blocks, local
        self._sums: dict[int, Tensor] = {}  # by owner: sums that have not been sent
        # The layouts, not their sizes: fields of at most 16 bytes in both dtypes are padded to equal sizes.
        self._rounds = blocks.pass_messages.results[blocks.side] != blocks.pass_messages.sums[blocks.side]
        self._joined: Views = ()  # sums of the local block from a launch that also took remote blocks

    def accumulators(self, step: Step, messages: StepMessages) -> Views:
        """Return the buffers to which the kernel adds: the local sums, or zeros for remote blocks."""
        side = messages.side
        if side is None:
            return self._local[self._blocks.side]
        sums = self._blocks.buffer(sum(messages.sums))
        with self._blocks.copies():
            sums.zero_()
        layout, parts = self._blocks.pass_messages.sums[side], torch.split(sums, list(messages.sums))
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
        message, wide = blocks.buffer(size), blocks.views(blocks.pass_messages.sums[move.side], sums)
        with blocks.copies():
            for rounded, total in zip(
                blocks.views(blocks.pass_messages.results[move.side], message), wide, strict=True
            ):
                rounded.copy_(total)
        return message

    def _receive(self, move: Move) -> None:
        """Add gradients that arrived to the sums of the same block on this rank."""
        blocks = self._blocks
        received = blocks.views(blocks.pass_messages.results[move.side], blocks.take(move))
        if move.owner != blocks.rank:
            self._add(blocks.views(blocks.pass_messages.sums[move.side], self._sums[move.owner]), received)
            return
        for in_block, in_message in ranges_in_message(move.rows):
            local = tuple(rows_of(x, in_block) for x in self._local[move.side])
            self._add(local, tuple(rows_of(x, in_message) for x in received))

    def _add(self, sums: Views, contributions: Views) -> None:
        with self._blocks.copies():
            for total, contribution in zip(sums, contributions, strict=True):
                total += contribution
