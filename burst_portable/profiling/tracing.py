"""Trace this process with the vendor's tracer (level "kernels"), and assign the events to the plan.

Each kernel call and each message of the plan runs inside an annotation. The tracer ties each device event to the host
call that launched it, and that call is inside one of these annotations, or in none::

    host      [ burst_portable: rank=0 ring/forward train_step=0 call=3 ring_step=2 q0 x kv2 ]
                      | launch, correlation 17
    device            `-----> [ flash_fwd_kernel ]

Without a traced device, torch's operators on the host replace the kernels.
"""

from __future__ import annotations

import tempfile
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator
from contextlib import AbstractContextManager
from decimal import Decimal
from pathlib import Path
from typing import Any

import torch

from burst_portable.backends import base as backends
from burst_portable.backends.selection import for_device
from burst_portable.errors import InputError, UnsupportedError
from burst_portable.profiling.event_tables import KernelTrace, PlanLocation
from burst_portable.profiling.trace_files import MAX_TIME, TraceEvent, checked_trace, events_of_trace, kind_of
from burst_portable.utils.files import parse_json


class TorchTracer:
    """Implement `backends.base.Tracer` with torch.profiler, for all supported activities and all threads."""

    def __init__(self) -> None:
        options = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
        activities = torch.profiler.supported_activities()
        self._profiler = torch.profiler.profile(activities=activities, experimental_config=options, acc_events=True)

    def start(self) -> None:
        if torch.autograd.profiler._is_profiler_enabled:
            raise UnsupportedError(
                "another tracer is already running in this process",
                next_step="open one session of level 'kernels' per process: around run_threads, not inside of it",
            )
        self._profiler.start()

    def stop(self) -> bytes:
        self._profiler.stop()
        with tempfile.TemporaryDirectory(prefix="burst-portable-trace-") as folder:
            path = Path(folder) / "trace.json"
            self._profiler.export_chrome_trace(str(path))  # can be called only once
            return path.read_bytes()


def make_tracer() -> backends.Tracer:
    """Return the tracer of this machine's devices: the vendor's if it has one, else torch.profiler."""
    device = torch.accelerator.current_accelerator(check_available=True)
    return (device and for_device(device.type).tracer()) or TorchTracer()


class Tracer:
    """A tracer of this process and its trace."""

    def __init__(self, tracer: backends.Tracer | None = None) -> None:
        self._tracer = tracer or make_tracer()
        self._trace: bytes | UnsupportedError | None = None

    def start(self) -> None:
        """Begin to trace. Raise `UnsupportedError` if another tracer is running in this process."""
        self._tracer.start()

    @staticmethod
    def annotate(location: PlanLocation) -> AbstractContextManager[object]:
        """Return a context that annotates the trace with a location in the plan."""
        return torch.profiler.record_function(str(location))

    def stop(self) -> None:
        """Stop tracing. An error is raised later, when the trace is read: the traced work itself succeeded."""
        try:
            self._trace = self._tracer.stop()
        except UnsupportedError as error:
            self._trace = error

    def write(self, path: Path) -> None:
        """Write the tracer's own file, for ui.perfetto.dev. Raise `UnsupportedError` if there is no trace."""
        try:
            path.write_bytes(self._bytes())
        except OSError as error:
            raise InputError("the trace cannot be written", got=str(error)) from error

    def kernel_traces(self) -> dict[int, KernelTrace]:
        """Return the kernels of each rank of this process. Raise the same errors as `write`."""
        name = "the tracer's file"
        return join(checked_trace(parse_json(self._bytes(), name, "a trace", parse_float=Decimal), name))

    def _bytes(self) -> bytes:
        if self._trace is None:
            raise InputError("the trace is not finished; read it after the `with` block")
        if isinstance(self._trace, UnsupportedError):
            raise self._trace
        return self._trace


def join(trace: dict[str, Any]) -> dict[int, KernelTrace]:
    """Return the events of a trace that belong to a location in the plan, by rank."""
    events = list(events_of_trace(trace))
    annotations = _Annotations(events)
    on_device = any(kind_of(e.category, e.name) for e in events)
    names: dict[int, dict[tuple[str, str], int]] = defaultdict(dict)
    rows: dict[int, list[tuple[int, ...]]] = defaultdict(list)
    for kind, name, at, start, end in _device(events, annotations) if on_device else _host(events, annotations):
        number = names[at.rank].setdefault((at.activity, name), len(names[at.rank]))
        location = at.train_step, at.attention_call, int(at.backward), at.ring_step
        rows[at.rank].append((*location, KernelTrace.KINDS.index(kind), number, start, end))
    return {rank: KernelTrace.of(list(names[rank]), rows[rank], on_device=on_device) for rank in rows}


_ANNOTATIONS = ("user_annotation", "cpu_op")  # of Kineto, and of tracers that do not distinguish the two
_Found = tuple[str, str, PlanLocation, int, int]


def _device(events: list[TraceEvent], annotations: _Annotations) -> Iterator[_Found]:
    """Yield kernels and copies, each at the location that launched it."""
    launches = {}
    for e in events:
        if e.correlation is not None and not kind_of(e.category, e.name) and not e.category.endswith("annotation"):
            launches[e.correlation] = e
    for e in events:
        kind = kind_of(e.category, e.name)
        if kind and (launch := launches.get(e.correlation)) and (at := annotations.at(launch.thread, launch.start)):
            packs = kind == "compute" and not at.computes
            yield "copy" if packs else kind, e.name, at, e.start, e.end


def _host(events: list[TraceEvent], annotations: _Annotations) -> Iterator[_Found]:
    """Yield operators of the host; of nested operators, only the outermost one inside its annotation."""
    until: dict[Any, int] = defaultdict(int)
    operators = (e for e in events if e.category == "cpu_op" and not PlanLocation.parse(e.name))
    for e in sorted(operators, key=lambda e: (e.start, -e.end)):
        at = annotations.at(e.thread, e.start)
        if at and e.end > until[e.thread]:
            until[e.thread] = e.end
            yield "compute" if at.computes else "comm", e.name, at, e.start, e.end


class _Annotations:
    """The annotated ranges of each thread; they are never nested."""

    def __init__(self, events: list[TraceEvent]) -> None:
        self._ranges: dict[Any, list[tuple[int, int, PlanLocation]]] = defaultdict(list)
        for e in sorted(events, key=lambda e: e.start):
            if e.category in _ANNOTATIONS and (location := PlanLocation.parse(e.name)):
                self._ranges[e.thread].append((e.start, e.end, location))

    def at(self, thread: Any, moment: int) -> PlanLocation | None:
        """Return the location that a thread was annotated with at a time; None if there was none."""
        ranges = self._ranges.get(thread, [])
        index = bisect_right(ranges, (moment, MAX_TIME)) - 1
        return ranges[index][2] if index >= 0 and moment < ranges[index][1] else None
