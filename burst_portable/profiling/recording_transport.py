"""Define `RecordingTransport`, which records the exchanges between all ranks of one call, and their agreement."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from burst_portable.comm.base import Exchange, Parts, Strips, Transport, WrappedTransport
from burst_portable.profiling.recording_observer import RecordingObserver


class RecordingExchange(Exchange):
    """Implement `comm.base.Exchange`; record the wait for it."""

    def __init__(self, wrapped: Exchange, wait: Callable[[], None]) -> None:
        self._wrapped, self._wait = wrapped, wait

    def copy_local(self) -> None:
        self._wrapped.copy_local()

    def wait(self) -> None:
        self._wait()

    def wait_sent(self) -> None:
        self._wrapped.wait_sent()


class RecordingTransport(WrappedTransport):
    """Implement `comm.base.Transport` for one call; record its collectives. The observer records its messages."""

    def __init__(self, wrapped: Transport, observer: RecordingObserver) -> None:
        super().__init__(wrapped)
        self.supports_strided_sends = wrapped.supports_strided_sends
        self._observer = observer
        self._backward = False
        self._shared = self._begun = self._ordinal = 0

    def begin(self, digest: bytes = b"", bytes_per_sender: int = 0) -> None:
        self._begun += 1
        if self._begun == 2:  # the backward pass may skip the check that ranks agree
            self._begin_backward()
        self._wrapped.begin(digest, bytes_per_sender)

    def end(self) -> None:
        self._observer.recorder.rejoin()
        self._wrapped.end()

    def exchange(
        self, sends: Sequence[Parts | Strips], receives: Sequence[Parts], label: str, *, exclusive: bool = False
    ) -> Exchange:
        wrapped = self._wrapped.exchange(sends, receives, label, exclusive=exclusive)
        if not sends:
            return wrapped
        size = sum(part.size for one in sends for part in one.parts if part.peer != self.rank)
        device = sends[0].buffer.device

        def wait() -> None:
            self._record(0, size, self._observer.wait(wrapped.wait, device, self._backward, f"all ranks, {label}"))

        return RecordingExchange(wrapped, wait)

    def share(self, data: bytes, label: str = "share", timeout: float | None = None) -> list[bytes]:
        self._shared += 1
        if self._shared == 2:  # called once per pass
            self._begin_backward()
        clock = self._observer.recorder.clock(torch.device("cpu"))
        start = clock.mark()
        shared = self._wrapped.share(data, label, timeout)
        end = clock.mark()
        self._observer.recorder.waiting += end - start
        self._record(1, len(data) * (self.size - 1), (start, end))
        return shared

    def _begin_backward(self) -> None:
        if not self._backward:
            self._backward, self._ordinal, self._observer.step = True, 0, 0

    def _record(self, agreement: int, size: int, marks: tuple[Any, Any]) -> None:
        self._observer.row("collective", self._backward, self._observer.step, self._ordinal, agreement, size, *marks)
        self._ordinal += 1
