"""The deep level: the vendor's own tracer runs beside our marks, and its events get the plan's names.

Each kernel call and each message of the plan runs inside an annotation. The tracer ties what ran on the device to the
call on the host that launched it, and that call lies inside one of our annotations, or in none::

    host      [ burst_portable: rank 0 ring forward 0.3 step 2: q0 x kv2 ]
                      | launch, correlation 17
    device            `-----> [ flash_fwd_kernel ]

Where no device is traced, torch's operators on the host take the kernels' place.
"""

from __future__ import annotations

import tempfile
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch

from burst_portable.backends import base as backends
from burst_portable.backends.registry import for_device, tracer_of
from burst_portable.errors import InputError, UnsupportedError, explain
from burst_portable.profiling.place import Place
from burst_portable.profiling.traced import Traced
from burst_portable.profiling.traces import events_of_trace, kind_of, parse_trace


class TorchTracer:
    """See `backends.base.Tracer`: torch.profiler on everything that this build of torch can trace, in all threads."""

    def __init__(self) -> None:
        options = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
        activities = torch.profiler.supported_activities()
        self._profiler = torch.profiler.profile(activities=activities, experimental_config=options, acc_events=True)

    def start(self) -> None:
        if torch.autograd.profiler._is_profiler_enabled:
            raise UnsupportedError(
                explain(
                    "a tracer runs in this process already",
                    next_step="open one deep session per process: around run_local, not inside of it",
                )
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
    return (device and tracer_of(for_device(device.type))) or TorchTracer()


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
            raise InputError(explain("the trace cannot be written", got=str(error))) from error

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
