"""Define `HelperResults`: partial results of a forward pass whose queries another rank owns (`distflash`)."""

from __future__ import annotations

from torch import Tensor

from burst_portable.numerics import State
from burst_portable.planning.messages import StepMessages
from burst_portable.planning.routes import Move
from burst_portable.planning.schedule import Step
from burst_portable.runtime.blocks import Blocks
from burst_portable.runtime.local_result import LocalResult
from burst_portable.runtime.message_views import ranges_in_message, rows_of


class HelperResults:
    """Results of helpers: (out, LSE) of remote queries until they are sent, and those that arrive for local queries."""

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

    def end(self, step: Step, messages: StepMessages, local: LocalResult) -> None:
        """Merge results that arrived into the local result, if it has begun. Send the results of this step."""
        self._arrived += [(move, self._blocks.take(move)) for move in step.result_arrivals]
        if local.has_begun:
            self._merge(local)
        if messages.result_sends or messages.result_receives:
            sends = [(move, self._message(move, size)) for move, size in messages.result_sends]
            self._blocks.post(sends, messages.result_receives)

    def finish(self, local: LocalResult) -> None:
        """Merge the remaining results. Check that all results for other ranks were sent."""
        self._merge(local)
        assert not self._computed, "the plan returns every result of a helper"

    def _message(self, move: Move, size: int) -> Tensor:
        buffer = self._blocks.buffer(size)
        self._blocks.copy(self._computed.pop(move.owner), self._blocks.pass_messages.results["q"], buffer)
        return buffer

    def _merge(self, local: LocalResult) -> None:
        for move, buffer in self._arrived:
            with self._blocks.copies():
                out, lse = self._blocks.views(self._blocks.pass_messages.results["q"], buffer)
                for in_block, in_message in ranges_in_message(move.rows):
                    local.merge(slice(*in_block), rows_of(out, in_message), rows_of(lse, in_message))
        self._arrived = []
