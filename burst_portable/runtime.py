"""What one call runs on: a kernel and a transport.

The profiler installs a recording one; hot code knows nothing of it.
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
from burst_portable.kernels import whole
from burst_portable.kernels.contract import Gradients, Kernel, Options
from burst_portable.moves import Move
from burst_portable.numerics import State
from burst_portable.plans import Compute, Plan

if TYPE_CHECKING:
    from burst_portable.mesh import Mesh


class Queries(NamedTuple):
    """What the query side brings to the backward pass; LSE, delta and out are global.

    Either delta or out: operators on pieces want out, which does not travel.
    """

    q: Tensor
    dout: Tensor
    lse: Tensor
    delta: Tensor | None = None
    out: Tensor | None = None


class Runtime(Protocol):
    """Resolved once, in forward, and kept for backward. Tensors are shaped as `kernels.contract` says."""

    @property
    def transport(self) -> Transport:
        """For buffers and collectives."""

    def attend(self, compute: Compute, q: Tensor, k: Tensor, v: Tensor, options: Options, state: State | None) -> State:
        """The kernel, on one computation of the plan; `state` as it gave it for the one before, None for the first."""

    def attend_backward(
        self,
        compute: Compute,
        queries: Queries,
        k: Tensor,
        v: Tensor,
        options: Options,
        into: tuple[Tensor, ...],
    ) -> None:
        """The kernel's backward, on one computation of the plan; adds to `into`, which is (dq, dk, dv)."""

    def attend_whole(self, compute: Compute, q: Tensor, k: Tensor, v: Tensor, options: Options) -> State:
        """The kernel, on a computation that nothing is merged with: see `kernels.whole`."""

    def gradients(self, compute: Compute, tensors: tuple[Tensor, ...], options: Options) -> Gradients:
        """The kernel's backward on such a computation, of (dO, q, k, v, out, LSE)."""

    def copies(self, device: torch.device, step: int, *, backward: bool) -> AbstractContextManager[object]:
        """Around what is copied or added up beside the kernel: messages, and gradients that came."""

    def inbox(self, moves: Sequence[Move], size: int, device: torch.device) -> Tensor:
        """The transport's buffer of so many bytes for messages that are needed together, one after the other."""

    def post(
        self, sends: list[tuple[Move, Tensor]], receives: list[tuple[Move, Tensor]], step: int, *, backward: bool
    ) -> tuple[list[Handle], list[Handle]]:
        """The transport, on the moves of one step of a pass."""


_UNWATCHED = nullcontext()


@dataclass(frozen=True, slots=True)
class PlainRuntime:
    """Straight through. `places` say where messages come to lie, on a transport that wants to know."""

    kernel: Kernel
    transport: Transport
    places: Mapping[Move, int] = field(default_factory=dict)

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
        q, dout, lse, delta, out = queries
        dq, dk, dv = into
        self.kernel.attend_backward(dout, q, k, v, lse, compute.tiles, options, delta=delta, out=out, into=(dq, dk, dv))

    def attend_whole(self, compute: Compute, q: Tensor, k: Tensor, v: Tensor, options: Options) -> State:
        return whole.attend_whole(self.kernel, q, k, v, compute.tiles, options)

    def gradients(self, compute: Compute, tensors: tuple[Tensor, ...], options: Options) -> Gradients:
        dout, q, k, v, out, lse = tensors
        return whole.gradients(self.kernel, dout, q, k, v, out, lse, compute.tiles, options)

    def copies(self, device: torch.device, step: int, *, backward: bool) -> AbstractContextManager[object]:
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


installed: ContextVar[Callable[[Runtime, Plan, Mesh], Runtime] | None] = ContextVar("installed", default=None)
"""What wraps the runtime of a call, if anything does. Asked once a call, in forward; backward uses what that gave."""
