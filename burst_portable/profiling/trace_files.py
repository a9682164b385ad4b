"""Read trace files in Kineto's JSON, of our tracers and of other programs, and classify their events."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from burst_portable.backends.selection import as_kineto
from burst_portable.errors import InputError, in_a_line
from burst_portable.profiling.intervals import Timeline, with_unit
from burst_portable.utils.files import read_json

_COMMUNICATION = re.compile(r"nccl|rccl|hccl|hcom|memcpy p(to|2)p|peer.?to.?peer", re.IGNORECASE)
_WAITING = re.compile(r"wait_?(signal|value|flag)|(signal|stream|event|notify)_?wait", re.IGNORECASE)
_MAX_BYTES = 1 << 30  # of a trace, unpacked
MAX_TIME = 1 << 62  # nanoseconds since 1970: the year 2116
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
            if not 0 <= start <= end < MAX_TIME:
                raise ValueError(f"an event from {start} to {end} ns")
            category, name = str(event.get("cat", "")), str(event.get("name", ""))
            correlation = (event.get("args") or {}).get("correlation")
            yield TraceEvent(category, name, (event.get("pid"), event.get("tid")), start, end, correlation)


def load_trace(path: Path) -> dict[str, Any]:
    """Read a file of Kineto's JSON, also .gz. Raise `InputError` if it is not such a trace."""
    return checked_trace(read_json(path, "a trace", _MAX_BYTES, parse_float=Decimal, next_step=_ADVICE), str(path))


def checked_trace(data: Any, path: str) -> dict[str, Any]:
    """Return parsed JSON as a trace in Kineto's form. Raise `InputError` if it is none. `path`: Its name in errors."""
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
    if not abs(number) * 1000 < MAX_TIME:  # before it becomes an int, which may have a billion digits
        raise ValueError("a time out of range")
    return int(number * 1000)
