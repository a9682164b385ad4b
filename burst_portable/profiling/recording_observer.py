"""Define `RecordingObserver`, which records the kernels, the copies and the messages of one call."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from burst_portable.comm.base import Handle
from burst_portable.planning.schedule import Compute
from burst_portable.profiling.event_tables import NEVER, PlanLocation
from burst_portable.profiling.recorder import Recorder
from burst_portable.runtime.prepared_call import Observer, Posting, PreparedCall, Sent


class RecordingObserver(Observer):
    """Record one call: its forward pass and its backward pass."""

    def __init__(self, prepared: PreparedCall, recorder: Recorder) -> None:
        self.recorder, self._outer = recorder, prepared.observer
        recorder.backend = prepared.backend
        recorder.used_kernels[prepared.kernel.name] = prepared.reason
        self._facts = recorder.facts(prepared.plan)
        self._location = recorder.train_step, recorder.attention_call - 1
        recorder.transport, recorder.high_priority = prepared.transport.name, prepared.transport.high_priority
        self.step = 0

    def row(self, kind: str, backward: bool, step: int, *rest: Any) -> None:
        """Append a row."""
        self.recorder.rows[kind].append((*self._location, int(backward), step, *rest))

    def annotate(self, backward: bool, step: int, activity: str) -> AbstractContextManager[object]:
        """Return a context that annotates the vendor's trace with an activity; it does nothing without a tracer."""
        if self.recorder.annotate is None:
            return nullcontext()
        strategy = self._facts.plan.strategy
        return self.recorder.annotate(
            PlanLocation(self.recorder.rank, strategy, backward, *self._location, step, activity)
        )

    def wait(self, wait: Callable[[], object], device: torch.device, backward: bool, activity: str) -> tuple[Any, Any]:
        """Wait, and return the marks before and after it."""
        clock = self.recorder.clock(device)
        with self.annotate(backward, self.step, activity):
            start = clock.mark()
            wait()
            end = clock.mark()
        if isinstance(start, int):
            self.recorder.waiting += end - start
        return start, end

    @contextmanager
    def computes(self, compute: Compute, like: Tensor, *, backward: bool) -> Iterator[None]:
        clock = self.recorder.clock(like.device)
        if not self._facts.dtype:
            self._facts.dtype = str(like.dtype).removeprefix("torch.")
        step, pairs, tiles, flops = self._facts.computes[backward, compute]
        with self.annotate(backward, step, compute.label):
            start = clock.mark()
            with self._outer.computes(compute, like, backward=backward):
                yield
            end = clock.mark()
        self.step = step
        if isinstance(start, int):
            self.recorder.kernels += end - start
        owners = (one[0] if len(one) == 1 else -1 for one in (compute.q_owners, compute.k_owners))  # -1: several
        self.row("compute", backward, step, *owners, pairs, tiles, flops, start, end)

    @contextmanager
    def copies(self, device: torch.device, step: int, *, backward: bool) -> Iterator[None]:
        with self._outer.copies(device, step, backward=backward):
            if self.recorder.is_basic:
                yield
                return
            clock = self.recorder.clock(device)
            with self.annotate(backward, step, "copies"):
                start = clock.mark()
                yield
                self.row("copy", backward, step, start, clock.mark())

    def posts(self, sends: Sequence[Sent], receives: Sequence[Sent], step: int, *, backward: bool) -> Posting:
        self.step = step
        outer = self._outer.posts(sends, receives, step, backward=backward)
        return RecordingPosting(self, outer, sends, receives, step, backward)


class RecordingPosting(Posting):
    """Record when the messages of a step were posted, and each message after the wait for it."""

    def __init__(
        self,
        observer: RecordingObserver,
        outer: Posting,
        sends: Sequence[Sent],
        receives: Sequence[Sent],
        step: int,
        backward: bool,
    ) -> None:
        self._observer, self._outer, self._sends, self._receives = observer, outer, sends, receives
        self._step, self._backward = step, backward
        self._posted = self._left = NEVER
        is_basic = observer.recorder.is_basic
        self._clock = None if is_basic else observer.recorder.clock((sends or receives)[0][1].device)
        self._stack = ExitStack()

    def __enter__(self) -> Posting:
        if self._clock is not None:
            self._stack.enter_context(self._observer.annotate(self._backward, self._step, "posts messages"))
            self._posted = self._clock.mark()
        self._stack.enter_context(self._outer)
        return self

    def __exit__(self, *error: Any) -> None:
        if self._clock is not None:
            self._left = self._clock.mark()
        self._stack.__exit__(*error)

    def wrap(self, leaving: list[Handle], arriving: list[Handle]) -> tuple[list[Handle], list[Handle]]:
        leaving, arriving = self._outer.wrap(leaving, arriving)
        # A handle of a batch is watched once. A batch of sends only is not watched.
        clock = self._clock
        arrivals = {} if clock is None else {one: clock.arrival(one.wait) for one in dict.fromkeys(arriving)}
        received = [self._recording(*one, 0, arrivals) for one in zip(arriving, self._receives, strict=True)]
        if clock is None:
            return leaving, received
        return [self._recording(*one, 1, arrivals) for one in zip(leaving, self._sends, strict=True)], received

    def _recording(self, handle: Handle, message: Sent, sends: int, arrivals: Mapping[Handle, Any]) -> Handle:
        """Return the handle of a message that records it after the wait for it."""
        move, buffer = message
        observer, backward, device = self._observer, self._backward, buffer.device
        about = sends, move.target if sends else move.source, move.owner, int(move.is_result), buffer.numel()
        row = self._step, *about, self._posted, self._left, arrivals.get(handle, NEVER)

        def wait() -> None:
            if not sends:
                observer.step = move.wait_step
            marks = observer.wait(handle.wait, device, backward, "waits for a message")
            observer.row("message", backward, observer.step, *row, *marks)

        return RecordingHandle(wait)


class RecordingHandle:
    """Implement `comm.base.Handle` with a function."""

    def __init__(self, wait: Callable[[], None]) -> None:
        self.wait = wait
