"""`Runtime`: what the code that runs plans gets its kernels and messages from.

`PlainRuntime` hands everything straight to a kernel and a transport. The profiler installs one that also records (see
`installed`); the code that runs plans does not know.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch
from torch import Tensor

from burst_portable.comm.base import Handle, Message, Transport
from burst_portable.kernels import base as whole
from burst_portable.kernels.base import Gradients, Kernel, Options
from burst_portable.numerics import State
from burst_portable.planning.plans import Plan
from burst_portable.planning.routes import Move
from burst_portable.planning.schedule import Compute

if TYPE_CHECKING:
    from burst_portable.mesh import Mesh


class Queries(NamedTuple):
    """The query side of a backward pass, shaped as `kernels.base` says; LSE, delta and out are global.

    Either delta or out is given: out, which never travels, for kernels that call operators on pieces.
    """

    q: Tensor
    dout: Tensor
    lse: Tensor
    delta: Tensor | None = None
    out: Tensor | None = None


class Runtime(Protocol):
    """Resolved once, in forward, and kept for backward. Tensors are shaped as `kernels.base` says."""

    @property
    def transport(self) -> Transport:
        """For buffers and collectives."""

    def attend(self, compute: Compute, q: Tensor, k: Tensor, v: Tensor, options: Options, state: State | None) -> State:
        """Run the kernel on one computation of the plan. `state`: what it returned for the last one; None at first."""

    def attend_backward(
        self, compute: Compute, queries: Queries, k: Tensor, v: Tensor, options: Options, into: tuple[Tensor, ...]
    ) -> None:
        """Run the kernel's backward on one computation of the plan; adds to `into`: (dq, dk, dv)."""

    def attend_whole(self, compute: Compute, q: Tensor, k: Tensor, v: Tensor, options: Options) -> State:
        """Run the kernel on a computation that is a whole attention: see `kernels.base`."""

    @property
    def parts_rows(self) -> bool:
        """Whether the kernel has `attend_first`."""

    def attend_first(
        self, compute: Compute, q: Tensor, k: Tensor, v: Tensor, options: Options, merged: tuple[int, int], out: Tensor
    ) -> State:
        """Run the kernel on the first of several computations: see `kernels.base`."""

    def gradients(self, compute: Compute, tensors: tuple[Tensor, ...], options: Options) -> Gradients:
        """Run the kernel's backward on such a computation; `tensors`: (dO, q, k, v, out, LSE)."""

    def copying(self, device: torch.device, step: int, *, backward: bool) -> AbstractContextManager[object]:
        """A context around what is copied or added outside of kernels: messages, and gradients that arrived."""

    def inbox(self, moves: Sequence[Move], size: int, device: torch.device) -> Tensor:
        """The transport's buffer for messages that are needed together and lie one after the other in it.

        size: bytes of all of them.
        """

    def post(
        self, sends: list[tuple[Move, Tensor]], receives: list[tuple[Move, Tensor]], step: int, *, backward: bool
    ) -> tuple[list[Handle], list[Handle]]:
        """Start the moves of one step of a pass: (handles of the sends, handles of the receives), in order."""


_UNWATCHED = nullcontext()


@dataclass(frozen=True, slots=True)
class PlainRuntime:
    """See `Runtime`. `places`: where messages lie in inboxes, for a transport whose senders write there."""

    kernel: Kernel
    transport: Transport
    places: Mapping[Move, int] = field(default_factory=dict)

    def attend(self, compute: Compute, q: Tensor, k: Tensor, v: Tensor, options: Options, state: State | None) -> State:
        return self.kernel.attend(q, k, v, compute.tiles, options, state=state)

    def attend_backward(
        self, compute: Compute, queries: Queries, k: Tensor, v: Tensor, options: Options, into: tuple[Tensor, ...]
    ) -> None:
        q, dout, lse, delta, out = queries
        dq, dk, dv = into
        self.kernel.attend_backward(dout, q, k, v, lse, compute.tiles, options, delta=delta, out=out, into=(dq, dk, dv))

    def attend_whole(self, compute: Compute, q: Tensor, k: Tensor, v: Tensor, options: Options) -> State:
        return whole.attend_whole(self.kernel, q, k, v, compute.tiles, options)

    @property
    def parts_rows(self) -> bool:
        return whole.parts_rows(self.kernel)

    def attend_first(
        self, compute: Compute, q: Tensor, k: Tensor, v: Tensor, options: Options, merged: tuple[int, int], out: Tensor
    ) -> State:
        return whole.attend_first(self.kernel, q, k, v, compute.tiles, options, merged, out)

    def gradients(self, compute: Compute, tensors: tuple[Tensor, ...], options: Options) -> Gradients:
        dout, q, k, v, out, lse = tensors
        return whole.gradients(self.kernel, dout, q, k, v, out, lse, compute.tiles, options)

    def copying(self, device: torch.device, step: int, *, backward: bool) -> AbstractContextManager[object]:
        return _UNWATCHED

    def inbox(self, moves: Sequence[Move], size: int, device: torch.device) -> Tensor:
        return self.transport.inbox(size, device, moves[0].source, self.places.get(moves[0]))

    def post(
        self, sends: list[tuple[Move, Tensor]], receives: list[tuple[Move, Tensor]], step: int, *, backward: bool
    ) -> tuple[list[Handle], list[Handle]]:
        return self.transport.post(
            [Message(buffer, move.target, self.places.get(move)) for move, buffer in sends],
            [Message(buffer, move.source, self.places.get(move)) for move, buffer in receives],
            f"{'backward' if backward else 'forward'} step {step}",
        )


class WrappedRuntime:
    """See `Runtime`. Hands everything to the runtime inside, except what a derived class overrides."""

    def __init__(self, inner: Runtime) -> None:
        self.inner = inner
        self.transport = inner.transport

    def attend(self, compute: Compute, q: Tensor, k: Tensor, v: Tensor, options: Options, state: State | None) -> State:
        return self.inner.attend(compute, q, k, v, options, state)

    def attend_backward(
        self, compute: Compute, queries: Queries, k: Tensor, v: Tensor, options: Options, into: tuple[Tensor, ...]
    ) -> None:
        self.inner.attend_backward(compute, queries, k, v, options, into)

    def attend_whole(self, compute: Compute, q: Tensor, k: Tensor, v: Tensor, options: Options) -> State:
        return self.inner.attend_whole(compute, q, k, v, options)

    @property
    def parts_rows(self) -> bool:
        return self.inner.parts_rows

    def attend_first(
        self, compute: Compute, q: Tensor, k: Tensor, v: Tensor, options: Options, merged: tuple[int, int], out: Tensor
    ) -> State:
        return self.inner.attend_first(compute, q, k, v, options, merged, out)

    def gradients(self, compute: Compute, tensors: tuple[Tensor, ...], options: Options) -> Gradients:
        return self.inner.gradients(compute, tensors, options)

    def copying(self, device: torch.device, step: int, *, backward: bool) -> AbstractContextManager[object]:
        return self.inner.copying(device, step, backward=backward)

    def inbox(self, moves: Sequence[Move], size: int, device: torch.device) -> Tensor:
        return self.inner.inbox(moves, size, device)

    def post(
        self, sends: list[tuple[Move, Tensor]], receives: list[tuple[Move, Tensor]], step: int, *, backward: bool
    ) -> tuple[list[Handle], list[Handle]]:
        return self.inner.post(sends, receives, step, backward=backward)


installed: ContextVar[Callable[[Runtime, Plan, Mesh], Runtime] | None] = ContextVar("installed", default=None)
"""If set, makes the runtime that a call uses out of its own. Called once per call, in forward; backward keeps it."""
