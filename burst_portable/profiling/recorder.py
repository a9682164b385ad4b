"""Record the events of one rank: the rows, their clock, and the facts of its plans."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from burst_portable.backends.base import Backend
from burst_portable.backends.selection import for_device, hardware_of, open_or_reason
from burst_portable.comm.base import Exchange, Handle, Parts, Strips, Transport, WrappedTransport
from burst_portable.errors import InputError, LayoutError
from burst_portable.layout import NAMES, OF_MASKS, make_layout
from burst_portable.planning.call import AttentionCall
from burst_portable.planning.cost import pass_flops, rank_cost
from burst_portable.planning.hardware import HardwareSpec
from burst_portable.planning.plans import PASSES, Plan
from burst_portable.planning.schedule import Compute
from burst_portable.planning.tiles import BlockPairs
from burst_portable.profiling.clocks import HostClock, Sensors, make_clock, read_core_wait
from burst_portable.profiling.event_tables import COLUMNS, NEVER, TIMES, PlanLocation, RankRecords, Table
from burst_portable.runtime.prepared_call import Observer, Posting, PreparedCall, Sent
from burst_portable.strategies.planner import cached_plan
from burst_portable.strategies.registry import classes, collect_reason, make_strategy

_MAX_REGIONS = 1 << 11  # ranks times regions of the mask: above this, trying layouts takes too long
_MAX_SEGMENTS = 1 << 17  # ranks times segments of all keys: half a second


def alternatives(plan: Plan, rank: int, hardware: HardwareSpec) -> dict[str, dict[str, Any]]:
    """Return other strategies: bytes sent and predicted seconds of this rank in both passes, and what circulates."""
    found = {}
    suggested = [make_strategy(label) for one in classes().values() for label in one.suggested]
    for strategy in suggested:
        with collect_reason(strategy.name, "", {}):
            other = cached_plan(strategy, plan.call)
            costs = [rank_cost(other, one, rank, hardware) for one in PASSES]
            found[strategy.label] = {
                "sent_bytes": sum(c.sent for c in costs),
                "seconds": sum(c.seconds for c in costs),
                "circulates": {one: pass_plan.circulates for one, pass_plan in other.passes()},
            }
    return found


def layout_imbalances(call: AttentionCall) -> dict[str, float]:
    """Return layouts by name with the pairs of the busiest rank over the mean; slow ones are left out."""
    length, ranks, mask = call.layout.length, call.ranks, call.mask
    if ranks * len(mask.regions) > _MAX_REGIONS or length != call.k_layout.length:
        return {}
    found = {}
    for name in NAMES:
        try:
            layout = make_layout(name, length, ranks, mask if name in OF_MASKS else None)
        except (InputError, LayoutError):
            continue  # the layout needs documents, and the mask has none
        keys = layout.joined().sorted().shards  # one segment, unless a layout has steps larger than 1
        if ranks * len(keys[0]) <= _MAX_SEGMENTS:
            blocks = BlockPairs(mask, layout.shards, keys)
            pairs = [blocks.num_pairs(rank, 0) for rank in range(ranks)]
            if sum(pairs):
                found[name] = max(pairs) * ranks / sum(pairs)
    return found


Annotate = Callable[[PlanLocation], AbstractContextManager[object]]

_PLANNED = {
    "flops": "flops",
    "memory_bytes": "memory",
    "sent_bytes": "sent",
    "received_bytes": "received",
    "seconds": "seconds",
    "compute_seconds": "compute_seconds",
    "link_seconds": "link_seconds",
}
"""JSON keys of a pass, and the fields of `cost.PassCost`."""
BASIC_KEPT = 100_000
"""Number of latest rows of a kind that level "basic" keeps."""


class Recorder:
    """Record the events of one rank.

    `annotate` annotates the tracer's trace. The first training step starts at `since` nanoseconds, by default now.
    `hardware` is a file of the `HardwareSpec` for predictions, by default the backend's own.
    """

    def __init__(
        self,
        rank: int,
        host: str,
        *,
        level: str = "standard",
        annotate: Annotate | None = None,
        since: int | None = None,
        hardware: str = "",
    ) -> None:
        self._hardware = hardware
        self.rank, self.host, self.level, self.annotate = rank, host, level, annotate
        self._since: Any = time.perf_counter_ns() if since is None else since  # start of the current training step
        kept = BASIC_KEPT if self.is_basic else None
        self.train_steps: deque[tuple[Any, ...]] = deque(maxlen=kept)
        self.core_waits: deque[tuple[int, int]] = deque(maxlen=kept)
        self._core_wait = read_core_wait()  # nanoseconds at the start of the current training step
        self.rows: dict[str, deque[tuple[Any, ...]]] = {kind: deque(maxlen=kept) for kind in COLUMNS}
        self.train_step, self.attention_call = 0, 0
        self.kernels = self.waiting = 0  # nanoseconds, if marks are times of the host
        self.calls: deque[tuple[int, int, int]] = deque(maxlen=kept)
        self._plans: dict[int, tuple[int, Plan, PlanFacts]] = {}
        self._clocks: dict[torch.device, HostClock] = {}
        self._device: torch.device | None = None
        self.sensors: Sensors | None = None
        self.transport = ""  # its name, set by the first call
        self.backend: Backend | None = None  # that of the calls, set by the first one
        self.used_kernels: dict[str, str] = {}  # name -> why the calls used it
        self.high_priority = False  # of its messages

    @property
    def is_basic(self) -> bool:
        """Return whether only kernels and waits are recorded, and only the latest."""
        return self.level == "basic"

    def clock(self, device: torch.device) -> HostClock:
        """Return the clock of a device; the first call creates it."""
        if device not in self._clocks:
            backend = self._backend_for(device.type)
            self._clocks[device] = make_clock(device, streams=backend.capabilities.streams)
            if not self._device or backend.capabilities.streams:  # otherwise marks are times of the host
                self._device = device
            if self.sensors is None and not self.is_basic and device.index is not None:
                self.sensors = Sensors(open_or_reason(backend.meter, device.index))
        return self._clocks[device]

    def _backend_for(self, device_type: str) -> Backend:
        """Return the backend of the calls, or the default one of another type of device."""
        if self.backend is not None and self.backend.capabilities.device_type == device_type:
            return self.backend
        return for_device(device_type)

    @property
    def device_type(self) -> str | None:
        """Type of the device that computes attention; None before the first call."""
        return self._device.type if self._device else None

    def rejoin(self) -> None:
        """End a pass: let the current streams wait until no stream waits for one of its messages."""
        for clock in self._clocks.values():
            clock.rejoin()

    def facts(self, plan: Plan) -> PlanFacts:
        """Return the facts of a plan that is about to run. The first call computes them and numbers the plan."""
        known = self._plans.get(id(plan))
        if known is None:
            known = self._plans[id(plan)] = len(self._plans), plan, PlanFacts(plan, self.rank)
        self.calls.append((self.train_step, self.attention_call, known[0]))
        self.attention_call += 1
        return known[2]

    def next_train_step(self) -> None:
        """Assign all later calls to the next training step."""
        since = self._since
        self._add_core_wait()
        self.begin_step()
        if self.calls:
            self.train_steps.append((self.train_step, since, self._since))
            self.train_step, self.attention_call = self.train_step + 1, 0

    def begin_step(self) -> None:
        """Start the training step now, on the device's clock. Earlier time belongs to no step."""
        self._core_wait = self._read_core_wait()
        self._since = self._clocks[self._device].mark() if self._device else time.perf_counter_ns()

    def _read_core_wait(self) -> int | None:
        """Return nanoseconds that this process has waited for a core; None if work runs on streams of a device."""
        if self._device is None or self._backend_for(self._device.type).capabilities.streams:
            return None
        return read_core_wait()

    def _add_core_wait(self) -> None:
        """Add the time that this process has waited for a core since the last call, or since the step began."""
        before, self._core_wait = self._core_wait, self._read_core_wait()
        if before is not None and self._core_wait is not None:
            self.core_waits.append((self.train_step, max(0, self._core_wait - before)))

    def records(self) -> RankRecords:
        """Return all records in nanoseconds. On a device with streams, wait for the last mark."""
        self._add_core_wait()
        clock = self._clocks[self._device] if self._device else None
        drift = clock.end() if clock else None
        for kind, rows in self.rows.items():
            times = [i for i, name in enumerate(COLUMNS[kind]) if name in TIMES]
            self.rows[kind] = deque((self._read(row, times) for row in rows), maxlen=rows.maxlen)
        self.train_steps = deque((self._read(row, [1, 2]) for row in self.train_steps), maxlen=self.train_steps.maxlen)
        device = self.device_type or "cpu"
        backend = self._backend_for(device)
        plans = [facts for _, _, facts in self._plans.values()]
        dtypes = sorted({facts.dtype for facts in plans if facts.dtype})
        return RankRecords(
            self.rank,
            self.host,
            clock.evidence if clock else "host clock",
            {kind: Table.of(kind, list(rows)) for kind, rows in self.rows.items()},
            [facts.describe(backend, self._hardware, high_priority=self.high_priority) for facts in plans],
            list(self.calls),
            {
                "device": device,
                "backend": backend.name,
                "kernels": list(self.used_kernels),
                "level": self.level,
                "drift": drift and asdict(drift),
                "sensors": self.sensors.facts() if self.sensors else {"reason": "not read", "time_ns": []},
                "transport": {"used": self.transport, "direct": backend.capabilities.direct_transport},
                "peaks": [asdict(backend.peaks(dtype)) for dtype in dtypes],
            },
            train_steps=list(self.train_steps),
            core_waits=list(self.core_waits),
        )

    def _read(self, row: tuple[Any, ...], times: list[int]) -> tuple[int, ...]:
        if all(isinstance(row[i], int) for i in times):
            return row
        assert self._device is not None
        clock = self._clocks[self._device]
        read = {i: row[i] if isinstance(row[i], int) else clock.read(row[i]) for i in times}
        return tuple(read.get(i, value) for i, value in enumerate(row))


class PlanFacts:
    """The facts of a plan about one rank's kernel calls."""

    def __init__(self, plan: Plan, rank: int) -> None:
        self.plan, self.rank = plan, rank
        self.dtype = ""  # of the tensors, set by the first kernel call
        self.computes: dict[tuple[bool, Compute], tuple[int, int, int, int]] = {}
        for backward, (name, pass_plan) in enumerate(plan.passes()):
            for step in plan.steps(name, rank):
                if c := step.compute:
                    num_pairs = c.tiles.num_pairs
                    work = pass_flops(pass_plan.call, name, num_pairs) // (1 + plan.score_rows)  # twice the launches
                    self.computes[bool(backward), c] = step.index, num_pairs, len(c.tiles), work

    def describe(self, backend: Backend, file: str = "", *, high_priority: bool = False) -> dict[str, Any]:
        """Return the plan's facts for a report. Predictions use the hardware of a file, else the backend's."""
        plan, call = self.plan, self.plan.call
        hardware, source = self._hardware_and_source(backend, file, high_priority)
        costs = {name: rank_cost(plan, name, self.rank, hardware) for name in PASSES}
        return {
            "strategy": plan.label,
            "reason": plan.reason,
            **call.facts(),
            "dtype": self.dtype,
            "head_parallel_size": plan.head_parallel_size,
            "head_spacing": plan.head_spacing,
            "circulates": {name: pass_plan.circulates for name, pass_plan in plan.passes()},
            "direct": plan.direct,
            "layouts": layout_imbalances(call),
            "hardware": {
                "tflops": hardware.tflops,
                "intra_node_bandwidth": hardware.intra_node_bandwidth,
                "source": source,
            },
            "planned": {
                **{name: {key: getattr(c, field) for key, field in _PLANNED.items()} for name, c in costs.items()},
                "alternatives": alternatives(plan, self.rank, hardware),
            },
        }

    def _hardware_and_source(self, backend: Backend, file: str, high_priority: bool) -> tuple[HardwareSpec, str]:
        """Return the hardware for predictions and its source. An unusable file does not prevent a report."""
        call = self.plan.call
        note = ""
        try:
            hardware = hardware_of(
                backend, call.ranks, file=file, dtype=self.dtype, head_dim=call.head_dim, high_priority=high_priority
            )
        except InputError:
            hardware = hardware_of(backend, call.ranks, high_priority=high_priority)
            note = "; the hardware spec file in the settings cannot be used"
        return hardware, (hardware.source.removeprefix("of ") or "the backend's guess") + note


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
