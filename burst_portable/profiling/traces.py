"""Traces that torch.profiler wrote (Kineto's JSON, also .gz), or a vendor's own tracer, read into the same partition.

What others recorded has no plan, so events are told apart by name: NCCL's and RCCL's kernels and copies between devices
are communication, a kernel that waits for a signal is waiting, other copies are copies, all other kernels compute.
Annotations are never busy time, and nothing is left out for when it was launched.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from burst_portable.backends.registry import as_kineto
from burst_portable.errors import InputError, explain, in_a_line
from burst_portable.files import parse_json, read_json
from burst_portable.profiling.partition import Timeline

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
        raise InputError(explain(what, got=in_a_line(error))) from error
    if not spans:
        raise InputError(
            explain(
                f"{path} holds nothing that ran on a device",
                next_step="record with ProfilerActivity.CUDA; on CPUs the library's own profile() is the source",
            )
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
        raise InputError(explain(f"{path} is not a trace", got="JSON without a list of traceEvents", next_step=_ADVICE))
    try:
        return {**data, "traceEvents": as_kineto(data["traceEvents"])}
    except (AttributeError, TypeError) as error:
        raise InputError(explain(f"{path} is not a trace: an event cannot be read", got=str(error)[:200])) from error


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
