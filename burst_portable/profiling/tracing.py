"""The deep level: the vendor's own tracer runs beside our marks, and its events get the plan's names.

Each kernel call and each message of the plan runs inside an annotation. The tracer ties what ran on the device to the
call on the host that launched it, and that call lies inside one of our annotations, or in none::

    host      [ burst_portable: rank 0 ring forward 0.3 step 2: q0 x kv2 ]
                      | launch, correlation 17
    device            `-----> [ flash_fwd_kernel ]

Where no device is traced, torch's operators on the host take the kernels' place.
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
from burst_portable.profiling.intervals import Timeline, contention, union
from burst_portable.profiling.records import Place, Table, Traced
from burst_portable.utils.files import parse_json, read_json

_COMMUNICATION = re.compile(r"nccl|rccl|hccl|hcom|memcpy p(to|2)p|peer.?to.?peer", re.IGNORECASE)
_WAITING = re.compile(r"wait_?(signal|value|flag)|(signal|stream|event|notify)_?wait", re.IGNORECASE)
_LARGEST = 1 << 30  # bytes of a trace, unpacked
_LATEST = 1 << 62  # nanoseconds since 1970: the year 2116
_ADVICE = "pass JSON with traceEvents, as torch.profiler's export_chrome_trace writes it"
_COPIES = ("gpu_memcpy", "gpu_memset", "memcpy", "memset")  # older files say Memcpy


def read_trace(path: str | Path) -> dict[str, Any]:
    """The partition of one rank's trace: `rank`, `events`, the fields of `partition.FIELDS` in nanoseconds.

    Raises `InputError` for a file that is no such trace, or has nothing that ran on a device.
    """
    data = load_trace(Path(path))
    spans: dict[str, list[tuple[int, int]]] = defaultdict(list)
    try:
        rank = _rank(data)
        for event in events_of_trace(data):
            if kind := kind_of(event.category, event.name):
                spans[kind].append((event.start, event.end))
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        what = f"{path} is not a trace of torch.profiler: an event cannot be read"
        raise InputError(what, got=in_a_line(error)) from error
    if not spans:
        raise InputError(
            f"{path} holds nothing that ran on a device",
            next_step="record with ProfilerActivity.CUDA; on CPUs the library's own profile() is the source",
        )
    compute, comm, copy, waits = (
        np.array(spans[kind], dtype=np.int64).reshape(-1, 2) for kind in ("compute", "comm", "copy", "wait")
    )
    partition = Timeline.of(compute, np.concatenate((comm, waits)), copy, waits).partition()
    return {"rank": rank, "events": sum(map(len, spans.values())), **partition}


def kind_of(category: str, name: str) -> str | None:
    """ "compute", "comm", "wait" or "copy"; None for what did not run on a device."""
    category = category.lower()
    if category != "kernel" and category not in _COPIES:
        return None
    if _WAITING.search(name):
        return "wait"
    if _COMMUNICATION.search(name):
        return "comm"
    return "compute" if category == "kernel" else "copy"


class TraceEvent(NamedTuple):
    """One span of a trace, in nanoseconds; `correlation` ties what ran on a device to the call that launched it."""

    category: str
    name: str
    thread: tuple[Any, Any]
    start: int
    end: int
    correlation: Any


def events_of_trace(data: dict[str, Any]) -> Iterator[TraceEvent]:
    """All spans of a trace that `load_trace` read. A malformed event raises some Python error."""
    base = int(data.get("baseTimeNanoseconds", 0))
    for event in data["traceEvents"]:
        if event.get("ph") == "X":
            start = base + _nanoseconds(event["ts"])
            end = start + _nanoseconds(event.get("dur", 0))
            if not 0 <= start <= end < _LATEST:
                raise ValueError(f"an event from {start} to {end} ns")
            category, name = str(event.get("cat", "")), str(event.get("name", ""))
            correlation = (event.get("args") or {}).get("correlation")
            yield TraceEvent(category, name, (event.get("pid"), event.get("tid")), start, end, correlation)


def load_trace(path: Path) -> dict[str, Any]:
    """A file of Kineto's JSON, also .gz.

    Raises `InputError` for another file.
    """
    return _checked(read_json(path, "a trace", _LARGEST, parse_float=Decimal, next_step=_ADVICE), str(path))


def parse_trace(raw: bytes, path: str) -> dict[str, Any]:
    """The trace in `raw`, as `load_trace` returns it; `path` is for error messages."""
    return _checked(parse_json(raw, path, "a trace", parse_float=Decimal), path)


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
    """Numbers of any kind, and the strings that some profilers write."""
    try:
        number = Decimal(str(microseconds).strip())  # a float of microseconds since 1970 would have no nanoseconds
    except InvalidOperation:
        raise ValueError(f"{str(microseconds)[:40]!r} for a time") from None
    if not abs(number) * 1000 < _LATEST:  # before it becomes an int, which may have a billion digits
        raise ValueError("a time that is none")
    return int(number * 1000)


def _rank(data: dict[str, Any]) -> int | None:
    told = data.get("distributedInfo") or {}
    return int(told["rank"]) if "rank" in told else None


class TorchTracer:
    """See `backends.base.Tracer`: torch.profiler on everything that this build of torch can trace, in all threads."""

    def __init__(self) -> None:
        options = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
        activities = torch.profiler.supported_activities()
        self._profiler = torch.profiler.profile(activities=activities, experimental_config=options, acc_events=True)

    def start(self) -> None:
        if torch.autograd.profiler._is_profiler_enabled:
            raise UnsupportedError(
                "a tracer runs in this process already",
                next_step="open one deep session per process: around run_threads, not inside of it",
            )
        self._profiler.start()

    def stop(self) -> bytes:
        self._profiler.stop()
        with tempfile.TemporaryDirectory(prefix="burst-portable-trace-") as folder:
            path = Path(folder) / "trace.json"
            self._profiler.export_chrome_trace(str(path))  # it gives its trace away once
            return path.read_bytes()


def tracer_here() -> backends.Tracer:
    """The tracer that sees this machine's devices: their vendor's, else torch.profiler."""
    device = torch.accelerator.current_accelerator(check_available=True)
    return (device and for_device(device.type).tracer()) or TorchTracer()


class Tracer:
    """A tracer of this process, and its trace, under the plan's names."""

    def __init__(self, tracer: backends.Tracer | None = None) -> None:
        self._tracer = tracer or tracer_here()
        self._trace: bytes | UnsupportedError | None = None

    def start(self) -> None:
        """Begin to trace.

        Raises `UnsupportedError` where another tracer runs in this process.
        """
        self._tracer.start()

    @staticmethod
    def annotate(place: Place) -> AbstractContextManager[object]:
        """A range of the trace with the plan's name."""
        return torch.profiler.record_function(str(place))

    def stop(self) -> None:
        """Stop tracing. Errors are raised when the trace is asked for, since the work that was traced is done."""
        try:
            self._trace = self._tracer.stop()
        except UnsupportedError as error:
            self._trace = error

    def write(self, path: Path) -> None:
        """The tracer's own file, for ui.perfetto.dev.

        Raises `InputError` before `stop`, and where the file cannot be written; `UnsupportedError` without a trace.
        """
        try:
            path.write_bytes(self._bytes())
        except OSError as error:
            raise InputError("the trace cannot be written", got=str(error)) from error

    def joined(self) -> dict[int, Traced]:
        """What ran for each rank of this process, under the plan's names. Raises as `write`."""
        return join(parse_trace(self._bytes(), "the tracer's file"))

    def _bytes(self) -> bytes:
        if self._trace is None:
            raise InputError("the trace is not over; ask for it after the `with` block")
        if isinstance(self._trace, UnsupportedError):
            raise self._trace
        return self._trace


def join(trace: dict[str, Any]) -> dict[int, Traced]:
    """A trace's events that belong to a place of the plan, by rank."""
    events = list(events_of_trace(trace))
    annotations = _Annotations(events)
    on_device = any(kind_of(e.category, e.name) for e in events)
    names: dict[int, dict[tuple[str, str], int]] = defaultdict(dict)
    rows: dict[int, list[tuple[int, ...]]] = defaultdict(list)
    for kind, name, place, start, end in _device(events, annotations) if on_device else _host(events, annotations):
        number = names[place.rank].setdefault((place.what, name), len(names[place.rank]))
        where = place.iteration, place.call, int(place.backward), place.step
        rows[place.rank].append((*where, Traced.KINDS.index(kind), number, start, end))
    return {rank: Traced.of(list(names[rank]), rows[rank], on_device=on_device) for rank in rows}


_ANNOTATIONS = ("user_annotation", "cpu_op")  # Kineto's category, and that of tracers that do not distinguish the two
_Found = tuple[str, str, Place, int, int]


def _device(events: list[Any], annotations: _Annotations) -> Iterator[_Found]:
    """Kernels and copies, each at the place that launched it."""
    launches = {}
    for e in events:
        if e.correlation is not None and not kind_of(e.category, e.name) and not e.category.endswith("annotation"):
            launches[e.correlation] = e
    for e in events:
        kind = kind_of(e.category, e.name)
        if kind and (launch := launches.get(e.correlation)) and (place := annotations.at(launch.thread, launch.start)):
            packs = kind == "compute" and not place.computes
            yield "copy" if packs else kind, e.name, place, e.start, e.end


def _host(events: list[Any], annotations: _Annotations) -> Iterator[_Found]:
    """Operators of the host; of those that call one another, the outermost inside its annotation."""
    until: dict[Any, int] = defaultdict(int)
    operators = (e for e in events if e.category == "cpu_op" and not Place.parse(e.name))
    for e in sorted(operators, key=lambda e: (e.start, -e.end)):
        place = annotations.at(e.thread, e.start)
        if place and e.end > until[e.thread]:
            until[e.thread] = e.end
            yield "compute" if place.computes else "comm", e.name, place, e.start, e.end


class _Annotations:
    """Our ranges on each thread; they never lie inside one another."""

    def __init__(self, events: list[Any]) -> None:
        found = defaultdict(list)
        for e in events:
            if e.category in _ANNOTATIONS and (place := Place.parse(e.name)):
                found[e.thread].append((e.start, e.end, place))
        self._ranges = {thread: sorted(ranges) for thread, ranges in found.items()}
        self._starts = {thread: [r[0] for r in ranges] for thread, ranges in self._ranges.items()}

    def at(self, thread: Any, moment: int) -> Place | None:
        """The place of a moment on a thread."""
        index = bisect_right(self._starts.get(thread, ()), moment) - 1
        if index < 0:
            return None
        _, end, place = self._ranges[thread][index]
        return place if moment < end else None


def traced_facts(traced: Traced, compute: Table | None = None) -> dict[str, Any]:
    """Time by place and name, the longest first; the partition and contention too, where a device was traced.

    `compute` are the kernel calls that were marked: they say which kernels had the same to do.
    """
    rows = traced.rows
    places, group = np.unique(rows[:, [2, 3, 5]], axis=0, return_inverse=True)
    group = group.reshape(-1)
    counts = np.bincount(group, minlength=len(places))
    times = np.zeros(len(places), dtype=np.int64)
    np.add.at(times, group, rows[:, 7] - rows[:, 6])
    kinds = np.zeros(len(places), dtype=np.int64)
    kinds[group] = rows[:, 4]
    kernels = [
        {
            "backward": int(backward),
            "step": int(step),
            "what": traced.names[name][0],
            "kind": Traced.KINDS[kinds[i]],
            "name": traced.names[name][1],
            "times": int(counts[i]),
            "time": int(times[i]),
        }
        for i, (backward, step, name) in enumerate(places)
    ]
    kernels.sort(key=lambda k: -k["time"])
    told = _measured(traced, compute) if traced.on_device else {"partition": None, "contention": None}
    return {"on_device": traced.on_device, **told, "kernels": kernels}


def _measured(traced: Traced, marked: Table | None) -> dict[str, Any]:
    rows = traced.rows
    kernels, comm, waits, copies = (rows[rows[:, 4] == kind] for kind in range(len(Traced.KINDS)))
    timeline = Timeline.of(kernels[:, 6:], np.concatenate((comm, waits))[:, 6:], copies[:, 6:], waits[:, 6:])
    called = np.unique([name for _, name in traced.names], return_inverse=True)[1].reshape(-1)
    work = np.stack((kernels[:, 2], called[kernels[:, 5]], _pairs(kernels, marked)), axis=1)
    return {"partition": timeline.partition(), "contention": contention(kernels[:, 6:], work, union(comm[:, 6:]))}


def _pairs(kernels: NDArray[np.int64], marked: Table | None) -> NDArray[np.int64]:
    """How much the plan gave each kernel to do."""
    known = {} if marked is None else dict(zip(map(tuple, marked.data[:, :4].tolist()), marked["pairs"], strict=True))
    return np.array([known.get(tuple(place), 0) for place in kernels[:, :4].tolist()], dtype=np.int64)
