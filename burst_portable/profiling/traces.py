"""Traces that torch.profiler wrote (Kineto's JSON, also .gz), read into the same partition.

What others recorded has no plan, so events are told apart by name: NCCL's and RCCL's kernels and copies between devices
are communication, a kernel that waits for a signal is waiting, other copies are copies, all other kernels compute.
Annotations are never busy time, and nothing is left out for when it was launched.
"""

from __future__ import annotations

import gzip
import json
import re
from collections import defaultdict
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from burst_portable.errors import InputError, explain
from burst_portable.profiling.partition import Timeline

_COMMUNICATION = re.compile(r"nccl|rccl|hccl|memcpy p(to|2)p|peer.?to.?peer", re.IGNORECASE)
_WAITING = re.compile(r"wait_?(signal|value|flag)|signal_?wait|stream_?wait", re.IGNORECASE)
_COPIES = ("gpu_memcpy", "gpu_memset", "memcpy", "memset")  # older files say Memcpy


def read_trace(path: str | Path) -> dict[str, Any]:
    """The partition of one rank's trace: `rank`, `events`, the fields of `partition.FIELDS` in nanoseconds.

    Raises `InputError` for a file that is no such trace, or has nothing that ran on a device.
    """
    data = load_trace(Path(path))
    spans: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for event in events_of_trace(data):
        if kind := kind_of(event.category, event.name):
            spans[kind].append((event.start, event.end))
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
    return {"rank": _rank(data), "events": sum(map(len, spans.values())), **partition}


def kind_of(category: str, name: str) -> str | None:
    """ "compute", "comm", "wait" or "copy"; None for what is no work of a device."""
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
    """All spans of what `load_trace` read."""
    base = int(data.get("baseTimeNanoseconds", 0))
    for event in data["traceEvents"]:
        if event.get("ph") == "X":
            start = base + _nanoseconds(event["ts"])
            end = start + _nanoseconds(event.get("dur", 0))
            category, name = str(event.get("cat", "")), str(event.get("name", ""))
            correlation = (event.get("args") or {}).get("correlation")
            yield TraceEvent(category, name, (event.get("pid"), event.get("tid")), start, end, correlation)


def load_trace(path: Path) -> dict[str, Any]:
    """A file of Kineto's JSON, also .gz.

    Raises `InputError` for another file.
    """
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise InputError(explain(f"{path} is no trace", got=str(error))) from error
    return parse_trace(raw, str(path))


def parse_trace(raw: bytes, path: str) -> dict[str, Any]:
    """What `load_trace` read; `path` is for the message."""
    try:
        raw = gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw
        data = json.loads(raw, parse_float=Decimal)  # a float of microseconds since 1970 has no nanoseconds
    except (OSError, ValueError) as error:
        raise InputError(explain(f"{path} is no trace", got=str(error))) from error
    if isinstance(data, list):
        data = {"traceEvents": data}
    if not isinstance(data, dict) or not isinstance(data.get("traceEvents"), list):
        raise InputError(explain(f"{path} is no trace", allowed="JSON with traceEvents, as torch.profiler exports it"))
    return data


def _nanoseconds(microseconds: Any) -> int:
    """Numbers of any kind, and the strings that some profilers write."""
    return int(Decimal(str(microseconds).strip()) * 1000)


def _rank(data: dict[str, Any]) -> int | None:
    told = data.get("distributedInfo") or {}
    return int(told["rank"]) if "rank" in told else None
