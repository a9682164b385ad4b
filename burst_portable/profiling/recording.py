"""A runtime that writes down what goes through it: kernels, copies, messages, collectives, with the plan's facts.

It adds marks and appends tuples, and changes nothing that is computed or sent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeVar

import torch
from torch import Tensor

from burst_portable.comm.base import Exchange, Handle, Parts, Strips, Transport
from burst_portable.comm.wrapped import WrappedTransport
from burst_portable.kernels.contract import Gradients, Options
from burst_portable.moves import Move
from burst_portable.numerics import State
from burst_portable.plans import Plan
from burst_portable.profiling.place import Place
from burst_portable.profiling.record import NEVER
from burst_portable.profiling.recorder import Recorder
from burst_portable.runtime import Queries, Runtime, WrappedRuntime
from burst_portable.steps import Compute

T = TypeVar("T")


def _only(owners: tuple[int, ...]) -> int:
    """The owner of one block; -1 stands for several."""
    return owners[0] if len(owners) == 1 else -1


class RecordingRuntime(WrappedRuntime):
    """See `runtime.Runtime`. One for every call: forward, and the backward that belongs to it."""

    def __init__(self, inner: Runtime, plan: Plan, recorder: Recorder) -> None:
        super().__init__(inner)
        self.recorder = recorder
        self._facts = recorder.facts(plan)
        self._place = recorder.iteration, recorder.call - 1
        recorder.transport, recorder.goes_first = inner.transport.name, inner.transport.goes_first
        self.step = 0
        self.transport = RecordingTransport(inner.transport, self)

    def row(self, kind: str, backward: bool, step: int, *rest: Any) -> None:
        """Write down one row."""
        self.recorder.rows[kind].append((*self._place, int(backward), step, *rest))

    def mark(self, device: torch.device) -> Any:
        """Now, on the current stream of a device."""
        return self.recorder.clock(device).mark()

    def attend(self, compute: Compute, q: Tensor, k: Tensor, v: Tensor, options: Options, state: State | None) -> State:
        return self._watched(False, compute, q, lambda: self.inner.attend(compute, q, k, v, options, state))

    def attend_backward(
        self, compute: Compute, queries: Queries, k: Tensor, v: Tensor, options: Options, into: tuple[Tensor, ...]
    ) -> None:
        self._watched(True, compute, k, lambda: self.inner.attend_backward(compute, queries, k, v, options, into))

    def attend_whole(self, compute: Compute, q: Tensor, k: Tensor, v: Tensor, options: Options) -> State:
        return self._watched(False, compute, q, lambda: self.inner.attend_whole(compute, q, k, v, options))

    def attend_first(
        self, compute: Compute, q: Tensor, k: Tensor, v: Tensor, options: Options, merged: tuple[int, int], out: Tensor
    ) -> State:
        call = self.inner.attend_first
        return self._watched(False, compute, q, lambda: call(compute, q, k, v, options, merged, out))

    def gradients(self, compute: Compute, tensors: tuple[Tensor, ...], options: Options) -> Gradients:
        return self._watched(True, compute, tensors[1], lambda: self.inner.gradients(compute, tensors, options))

    def _watched(self, backward: bool, compute: Compute, q: Tensor, call: Callable[[], T]) -> T:
        """A call of the kernel, written down."""
        clock = self.recorder.clock(q.device)
        if not self._facts.dtype:
            self._facts.dtype = str(q.dtype).removeprefix("torch.")
        with self._of(backward, compute):
            start = clock.mark()
            result = call()
            self._computed(backward, compute, start, clock.mark())
        return result

    def named(self, backward: bool, step: int, what: str) -> AbstractContextManager[object]:
        """A context that names what happens inside it in the vendor's tracer; does nothing if none runs."""
        if self.recorder.annotate is None:
            return nullcontext()
        strategy = self._facts.plan.strategy
        return self.recorder.annotate(Place(self.recorder.rank, strategy, backward, *self._place, step, what))

    def _of(self, backward: bool, compute: Compute) -> AbstractContextManager[object]:
        return self.named(backward, self._facts.computes[backward, compute][0], compute.label)

    def _computed(self, backward: bool, compute: Compute, start: Any, end: Any) -> None:
        step, pairs, tiles, flops = self._facts.computes[backward, compute]
        owners = (_only(compute.q_owners), _only(compute.k_owners))
        self.step = step
        if isinstance(start, int):
            self.recorder.kernels += end - start
        self.row("compute", backward, step, *owners, pairs, tiles, flops, start, end)

    @contextmanager
    def copying(self, device: torch.device, step: int, *, backward: bool) -> Iterator[None]:
        if self.recorder.light:
            yield
            return
        clock = self.recorder.clock(device)
        with self.named(backward, step, "copies"):
            start = clock.mark()
            yield
            self.row("copy", backward, step, start, clock.mark())

    def post(
        self, sends: list[tuple[Move, Tensor]], receives: list[tuple[Move, Tensor]], step: int, *, backward: bool
    ) -> tuple[list[Handle], list[Handle]]:
        self.step = step
        if light := self.recorder.light:
            leaving, arriving = self.inner.post(sends, receives, step, backward=backward)
            posted = left = NEVER
        else:
            clock = self.recorder.clock((sends or receives)[0][1].device)
            with self.named(backward, step, "posts messages"):
                posted = clock.mark()
                leaving, arriving = self.inner.post(sends, receives, step, backward=backward)
                left = clock.mark()

        # A handle of a whole batch is watched once; one of sends alone is not worth it.
        arrivals = {} if light else {one: clock.arrival(one.wait) for one in dict.fromkeys(arriving)}

        def watched(handle: Handle, move: Move, buffer: Tensor, sent: bool) -> Handle:
            peer, arrived = move.target if sent else move.source, arrivals.get(handle, NEVER)
            what = step, int(sent), peer, move.owner, int(move.result), buffer.numel(), posted, left, arrived
            return RecordingHandle(handle, self, buffer.device, backward, None if sent else move.needed, what)

        came = [watched(h, m, b, False) for h, (m, b) in zip(arriving, receives, strict=True)]
        gone = leaving if light else [watched(h, m, b, True) for h, (m, b) in zip(leaving, sends, strict=True)]
        return gone, came


class RecordingHandle:
    """See `comm.base.Handle`. Its message is written down when it has been waited for."""

    def __init__(
        self,
        inner: Handle,
        runtime: RecordingRuntime,
        device: torch.device,
        backward: bool,
        needed: int | None,
        what: Any,
    ) -> None:
        self._inner, self._runtime, self._device = inner, runtime, device
        self._backward, self._needed, self._what = backward, needed, what

    def wait(self) -> None:
        runtime = self._runtime
        if self._needed is not None:
            runtime.step = self._needed
        clock = runtime.recorder.clock(self._device)
        with runtime.named(self._backward, runtime.step, "waits for a message"):
            start = clock.mark()
            self._inner.wait()
            end = clock.mark()
        if isinstance(start, int):
            runtime.recorder.waiting += end - start
        runtime.row("message", self._backward, runtime.step, *self._what, start, end)


class RecordingExchange(Exchange):
    """See `comm.base.Exchange`. Records how long it was waited for."""

    def __init__(self, inner: Exchange, waited: Callable[[Callable[[], None]], None]) -> None:
        self._inner, self._waited = inner, waited

    def copy_own(self) -> None:
        self._inner.copy_own()

    def wait(self) -> None:
        self._waited(self._inner.wait)

    def left(self) -> None:
        self._inner.left()


class RecordingTransport(WrappedTransport):
    """See `comm.base.Transport`. Collectives are written down; messages are, by their moves, in the runtime.

    One for every call, as its runtime is.
    """

    def __init__(self, inner: Transport, runtime: RecordingRuntime) -> None:
        super().__init__(inner)
        self.picks = inner.picks
        self._runtime = runtime
        self._backward = False
        self._shared = self._begun = self._ordinal = 0

    def begin(self, digest: bytes = b"", inbox: int = 0) -> None:
        self._begun += 1
        if self._begun == 2:  # ranks need not have asked again whether they agree
            self._begin_backward()
        self._inner.begin(digest, inbox)

    def end(self) -> None:
        self._runtime.recorder.rejoin()
        self._inner.end()

    def exchange(
        self, leaving: Sequence[Parts | Strips], arriving: Sequence[Parts], label: str, *, alone: bool = False
    ) -> Exchange:
        inner = self._inner.exchange(leaving, arriving, label, alone=alone)
        size = sum(part.size for one in leaving for part in one.parts if part.peer != self.rank)

        def waited(wait: Callable[[], None]) -> None:
            clock = self._runtime.recorder.clock(device)
            with self._runtime.named(self._backward, self._runtime.step, f"all ranks, {label}"):
                start = clock.mark()
                wait()
                self._collected(0, size, start, clock.mark())

        if not leaving:
            return inner
        device = leaving[0].buffer.device
        return RecordingExchange(inner, waited)

    def share(self, data: bytes, label: str = "share", deadline: float | None = None) -> list[bytes]:
        self._shared += 1
        if self._shared == 2:  # asked once per pass
            self._begin_backward()
        clock = self._runtime.recorder.clock(torch.device("cpu"))
        start = clock.mark()
        shared = self._inner.share(data, label, deadline)
        self._collected(1, len(data) * (self.size - 1), start, clock.mark())
        return shared

    def _begin_backward(self) -> None:
        if not self._backward:
            self._backward, self._ordinal, self._runtime.step = True, 0, 0

    def _collected(self, agreement: int, size: int, start: Any, end: Any) -> None:
        if isinstance(start, int):
            self._runtime.recorder.waiting += end - start
        place = self._backward, self._runtime.step
        self._runtime.row("collective", *place, self._ordinal, agreement, size, start, end)
        self._ordinal += 1
