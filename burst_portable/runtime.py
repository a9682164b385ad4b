"""What one call runs on: a kernel and a transport.

The profiler installs a recording one; hot code knows nothing of it.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from burst_portable.comm.base import Handle, Message, Transport
from burst_portable.kernels.contract import Kernel, Options
from burst_portable.moves import Move
from burst_portable.numerics import State
from burst_portable.plans import Compute, Plan

Queries = tuple[Tensor, ...]
"""What the query side brings to the backward pass: (q, dO, LSE, delta), the last two global."""


class Runtime(Protocol):
    """Resolved once, in forward, and kept for backward."""

    @property
    def transport(self) -> Transport:
        """For buffers and collectives."""

    def attend(self, compute: Compute, q: Tensor, k: Tensor, v: Tensor, options: Options, state: State | None) -> State:
        """The kernel, on one computation of the plan."""

    def attend_backward(
        self,
        compute: Compute,
        queries: Queries,
        k: Tensor,
        v: Tensor,
        options: Options,
        into: tuple[Tensor, ...],
    ) -> None:
        """The kernel's backward, on one computation of the plan."""

    def post(
        self, sends: list[tuple[Move, Tensor]], receives: list[tuple[Move, Tensor]], label: str
    ) -> tuple[list[Handle], list[Handle]]:
        """The transport, on the moves of one step."""


@dataclass(frozen=True, slots=True)
class PlainRuntime:
    """Straight through."""

    kernel: Kernel
    transport: Transport

    def attend(self, compute: Compute, q: Tensor, k: Tensor, v: Tensor, options: Options, state: State | None) -> State:
        return self.kernel.attend(q, k, v, compute.tiles, options, state=state)

    def attend_backward(
        self,
        compute: Compute,
        queries: Queries,
        k: Tensor,
        v: Tensor,
        options: Options,
        into: tuple[Tensor, ...],
    ) -> None:
        q, dout, lse, delta = queries
        dq, dk, dv = into
        self.kernel.attend_backward(dout, q, k, v, lse, compute.tiles, options, delta=delta, into=(dq, dk, dv))

    def post(
        self, sends: list[tuple[Move, Tensor]], receives: list[tuple[Move, Tensor]], label: str
    ) -> tuple[list[Handle], list[Handle]]:
        return self.transport.post(
            [Message(buffer, move.target) for move, buffer in sends],
            [Message(buffer, move.source) for move, buffer in receives],
            label,
        )


installed: ContextVar[Callable[[Runtime, Plan], Runtime] | None] = ContextVar("installed", default=None)
"""What wraps the runtime of a call, if anything does. Asked once a call, in forward; backward uses what that gave."""
