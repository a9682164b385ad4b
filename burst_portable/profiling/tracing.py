"""Assign the events of the vendor's tracer to the plan (level "kernels"), and read traces of other programs.

Each kernel call and each message of the plan runs inside an annotation. The tracer ties each device event to the host
call that launched it, and that call is inside one of these annotations, or in none::

    host      [ burst_portable: rank=0 ring/forward train_step=0 call=3 ring_step=2 q0 x kv2 ]
                      | launch, correlation 17
    device            `-----> [ flash_fwd_kernel ]

Without a traced device, torch's operators on the host replace the kernels.
"""

from __future__ import annotations

import re
import tempfile
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator
from contextlib import AbstractContextManager
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from burst_portable.backends import base as backends
from burst_portable.backends.selection import as_kineto, for_device
from burst_portable.errors import InputError, UnsupportedError, in_a_line
from burst_portable.profiling.event_tables import KernelTrace, PlanLocation, Table
from burst_portable.profiling.intervals import Timeline, contention, union, with_unit
from burst_portable.utils.files import parse_json, read_json

_COMMUNICATION = re.compile(r"nccl|rccl|hccl|hcom|memcpy p(to|2)p|peer.?to.?peer", re.IGNORECASE)
_WAITING = re.compile(r"wait_?(signal|value|flag)|(signal|stream|event|notify)_?wait", re.IGNORECASE)
_MAX_BYTES = 1 << 30  # of a trace, unpacked
_MAX_TIME = 1 << 62  # nanoseconds since 1970: the year 2116
_ADVICE = "pass JSON with traceEvents, as torch.profiler's export_chrome_trace writes it"
_COPIES = ("gpu_memcpy", "gpu_memset", "memcpy", "memset")  # older files have Memcpy


def read_trace(path: str | Path) -> dict[str, Any]:
    """Return the partition of one rank's trace: `rank`, `events`, and `intervals.FIELDS` in nanoseconds (`span_ns`).

    Raises:
        InputError: If the file is not a trace, or contains no event of a device.
    """
    data = load_trace(Path(path))
    spans: dict[str, list[tuple[int, int]]] = defaultdict(list)
    try:
        info = data.get("distributedInfo") or {}
        rank = int(info["rank"]) if "rank" in info else None
        for event in events_of_trace(data):
            if kind := kind_of(event.category, event.name):
                spans[kind].append((event.start, event.end))
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        what = f"{path} is not a trace of torch.profiler: an event cannot be read"
        raise InputError(what, got=in_a_line(error)) from error
    if not spans:
        raise InputError(
            f"{path} contains no event of a device",
            next_step="record with ProfilerActivity.CUDA; on CPUs, use profile() of burst_portable instead",
        )
    compute, comm, copy, waits = (
        np.array(spans[kind], dtype=np.int64).reshape(-1, 2) for kind in ("compute", "comm", "copy", "wait")
    )
    partition = Timeline.of(compute, np.concatenate((comm, waits)), copy, waits).partition()
    return {"rank": rank, "events": sum(map(len, spans.values())), **with_unit(partition)}


def kind_of(category: str, name: str) -> str | None:
    """Return "compute", "comm", "wait" or "copy"; None for an event that did not run on a device."""
    category = category.lower()
    if category != "kernel" and category not in _COPIES:
        return None
    if _WAITING.search(name):
        return "wait"
    if _COMMUNICATION.search(name):
        return "comm"
    return "compute" if category == "kernel" else "copy"


class TraceEvent(NamedTuple):
    """One span of a trace, in nanoseconds. An event of a device and the call that launched it share `correlation`."""

    category: str
    name: str
    thread: tuple[Any, Any]
    start: int
    end: int
    correlation: Any


def events_of_trace(data: dict[str, Any]) -> Iterator[TraceEvent]:
    """Yield all spans of a trace that `load_trace` read. A malformed event raises an error of Python."""
    base = int(data.get("baseTimeNanoseconds", 0))
    for event in data["traceEvents"]:
        if event.get("ph") == "X":
            start = base + _nanoseconds(event["ts"])
            end = start + _nanoseconds(event.get("dur", 0))
            if not 0 <= start <= end < _MAX_TIME:
                raise ValueError(f"an event from {start} to {end} ns")
            category, name = str(event.get("cat", "")), str(event.get("name", ""))
            correlation = (event.get("args") or {}).get("correlation")
            yield TraceEvent(category, name, (event.get("pid"), event.get("tid")), start, end, correlation)


def load_trace(path: Path) -> dict[str, Any]:
    """Read a file of Kineto's JSON, also .gz. Raise `InputError` if it is not such a trace."""
    return _checked(read_json(path, "a trace", _MAX_BYTES, parse_float=Decimal, next_step=_ADVICE), str(path))


def _checked(data: Any, path: str) -> dict[str, Any]:
    if isinstance(data, list):
        data = {"traceEvents": data}
    if not isinstance(data, dict) or not isinstance(data.get("traceEvents"), list):
        raise InputError(f"{path} is not a trace", got="JSON without a list of traceEvents", next_step=_ADVICE)
    try:
        return {**data, "traceEvents": as_kineto(data["traceEvents"])}
    except (AttributeError, TypeError) as error:
        raise InputError(f"{path} is not a trace: an event cannot be read", got=str(error)[:200]) from error


def _nanoseconds(microseconds: Any) -> int:
    """Convert microseconds: any number, or a string as some profilers write."""
    try:
        number = Decimal(str(microseconds).strip())  # a float of microseconds since 1970 would have no nanoseconds
    except InvalidOperation:
        raise ValueError(f"{str(microseconds)[:40]!r} for a time") from None
    if not abs(number) * 1000 < _MAX_TIME:  # before it becomes an int, which may have a billion digits
        raise ValueError("a time out of range")
    return int(number * 1000)


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
        return join(_checked(parse_json(self._bytes(), name, "a trace", parse_float=Decimal), name))

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
        index = bisect_right(ranges, (moment, _MAX_TIME)) - 1
        return ranges[index][2] if index >= 0 and moment < ranges[index][1] else None


def trace_summary(trace: KernelTrace, compute: Table | None = None) -> dict[str, Any]:
    """Return the time by location and name, the longest first; with a device, also partition and contention.

    Which kernels do equal work is derived from the marked kernel calls of the rank, if they are given.
    """
    rows = trace.rows
    columns = rows[:, [2, 3, 5, 4]]
    keys, group, counts = np.unique(columns, axis=0, return_inverse=True, return_counts=True)
    times = np.zeros(len(keys), dtype=np.int64)
    np.add.at(times, group.reshape(-1), rows[:, 7] - rows[:, 6])
    kernels = [
        {
            "backward": backward,
            "ring_step": step,
            "activity": trace.names[name][0],
            "kind": KernelTrace.KINDS[kind],
            "name": trace.names[name][1],
            "count": count,
            "time_ns": time,
        }
        for (backward, step, name, kind), count, time in zip(
            keys.tolist(), counts.tolist(), times.tolist(), strict=True
        )
    ]
    kernels.sort(key=lambda k: -k["time_ns"])
    measured = _measure(trace, compute) if trace.on_device else {"partition": None, "contention": None}
    return {"on_device": trace.on_device, **measured, "kernels": kernels}


def _measure(trace: KernelTrace, compute: Table | None) -> dict[str, Any]:
    """Return partition and contention of a device's kernels."""
    rows = trace.rows
    kernels, comm, waits, copies = (rows[rows[:, 4] == kind] for kind in range(len(KernelTrace.KINDS)))
    timeline = Timeline.of(kernels[:, 6:], np.concatenate((comm, waits))[:, 6:], copies[:, 6:], waits[:, 6:])
    names = np.unique([name for _, name in trace.names], return_inverse=True)[1].reshape(-1)
    work = np.stack((kernels[:, 2], names[kernels[:, 5]], _pairs(kernels, compute)), axis=1)
    slowdown = contention(kernels[:, 6:], work, union(comm[:, 6:]))
    return {"partition": with_unit(timeline.partition()), "contention": slowdown}


def _pairs(kernels: NDArray[np.int64], compute: Table | None) -> NDArray[np.int64]:
    """Return the number of pairs that the plan assigns to each kernel; 0 if unknown."""
    marked = [] if compute is None else zip(map(tuple, compute.locations.tolist()), compute["pairs"], strict=True)
    known = dict(marked)
    return np.array([known.get(tuple(location), 0) for location in kernels[:, :4].tolist()], dtype=np.int64)
