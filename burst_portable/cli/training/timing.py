"""A mesh that counts seconds: in kernels, and in waiting for other ranks. Nothing else about it differs.

Only where work is done when a call returns (see `Capabilities.streams`): elsewhere it would time the launches.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any, TypeVar

import torch
from torch import Tensor

from burst_portable.autograd import Call
from burst_portable.comm.base import Handle, Message, Transport
from burst_portable.mesh import Mesh

T = TypeVar("T")


@dataclass
class Clock:
    """Seconds so far."""

    kernels: float = 0.0
    waiting: float = 0.0


class TimedMesh(Mesh):
    """The ranks of a mesh, with a clock on its kernels and its transport."""

    def __init__(self, mesh: Mesh, clock: Clock) -> None:
        def connect(device_type: str) -> Transport:
            return _TimedTransport(mesh.transport(device_type), clock)

        super().__init__(mesh.rank, mesh.size, connect, group=mesh.group, inner=mesh.inner, config=mesh.config)
        self.clock = clock

    def remembered(self, key: Hashable, make: Callable[[], T]) -> T:
        """As the mesh does it; what is remembered about an attention gets the clock."""

        def timed() -> Any:
            made = make()
            return replace(made, runtime=_TimedRuntime(made.runtime, self.clock)) if isinstance(made, Call) else made

        return super().remembered(key, timed)


class _TimedRuntime:
    """See `runtime.Runtime`."""

    def __init__(self, runtime: Any, clock: Clock) -> None:
        self._runtime, self._clock = runtime, clock
        self.transport, self.post = runtime.transport, runtime.post

    def attend(self, *arguments: Any) -> Any:
        return self._timed(self._runtime.attend, arguments)

    def attend_backward(self, *arguments: Any) -> None:
        self._timed(self._runtime.attend_backward, arguments)

    def _timed(self, work: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
        started = perf_counter()
        try:
            return work(*arguments)
        finally:
            self._clock.kernels += perf_counter() - started


class _TimedTransport(Transport):
    """See `comm.base.Transport`."""

    def __init__(self, transport: Transport, clock: Clock) -> None:
        self._transport, self._clock = transport, clock
        self.name, self.rank, self.size = transport.name, transport.rank, transport.size

    def post(
        self, sends: Sequence[Message], receives: Sequence[Message], label: str = ""
    ) -> tuple[list[Handle], list[Handle]]:
        started = perf_counter()
        leaving, arriving = self._transport.post(sends, receives, label)
        self._clock.waiting += perf_counter() - started
        return [_TimedHandle(h, self._clock) for h in leaving], [_TimedHandle(h, self._clock) for h in arriving]

    def buffer(self, size: int, device: torch.device) -> Tensor:
        return self._transport.buffer(size, device)

    def close(self) -> None:
        self._transport.close()


class _TimedHandle:
    def __init__(self, handle: Handle, clock: Clock) -> None:
        self._handle, self._clock = handle, clock

    def wait(self) -> None:
        started = perf_counter()
        try:
            self._handle.wait()
        finally:
            self._clock.waiting += perf_counter() - started
