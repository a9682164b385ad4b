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
from decimal import Decimal
from pathlib import Path
from typing import Any

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
    path = Path(path)
    data = _loaded(path)
    base = int(data.get("baseTimeNanoseconds", 0))
    spans: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for event in data["traceEvents"]:
        if event.get("ph") == "X" and (kind := kind_of(str(event.get("cat", "")), str(event.get("name", "")))):
            start = base + _nanoseconds(event["ts"])
            spans[kind].append((start, start + _nanoseconds(event.get("dur", 0))))
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


def _loaded(path: Path) -> dict[str, Any]:
    try:
        raw = path.read_bytes()
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
