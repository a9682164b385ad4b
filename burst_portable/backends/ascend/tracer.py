"""Trace NPUs with torch_npu's profiler, since torch.profiler does not, and convert its file to Kineto's form.

Its `trace_view.json` is a list of events. Operators of the host, our annotations included, are ``cpu_op``. Events of
the device are in a process called "Ascend Hardware", with their kind in "Task Type". HCCL's operators are in
"Communication" ("HCCL" in older releases). A flow ``torch_to_npu`` leads from the start of an operator to the start of
the task that it launched. Written from the source of torch_npu 2.13, without a trace of a device.
"""

from __future__ import annotations

import tempfile
from importlib import import_module
from pathlib import Path
from typing import Any

from burst_portable.errors import UnsupportedError

Event = dict[str, Any]
_DEVICE = "Ascend Hardware"
_COMMUNICATION = ("Communication", "HCCL")
_COMPUTES = ("AI_CORE", "AI_VECTOR_CORE", "AIV", "AI_CPU", "MIX_", "KERNEL")
_COPIES = ("MEMCPY", "SDMA", "MEMSET")


class NpuTracer:
    """See `backends.base.Tracer`."""

    def start(self) -> None:
        module = import_module("torch_npu").profiler
        self._folder = tempfile.TemporaryDirectory(prefix="burst-portable-trace-", ignore_cleanup_errors=True)
        self._profiler = module.profile(
            activities=[module.ProfilerActivity.CPU, module.ProfilerActivity.NPU],
            on_trace_ready=module.tensorboard_trace_handler(self._folder.name),
        )
        self._profiler.start()

    def stop(self) -> bytes:
        self._profiler.stop()
        with self._folder as folder:
            written = sorted(Path(folder).rglob("trace_view.json"))
            # It prints its errors, including those of the start, and continues. Only the missing file shows them.
            if not written:
                raise UnsupportedError(
                    "torch_npu's profiler wrote no trace",
                    next_step="read what it printed to stderr; level 'session' needs no tracer",
                )
            return written[0].read_bytes()


def kineto(events: list[Event]) -> list[Event] | None:
    """Return the events of a `trace_view.json` in Kineto's form; None for a trace of another tracer."""
    process = {e.get("pid"): _name(e) for e in events if e.get("ph") == "M" and e.get("name") == "process_name"}
    if _DEVICE not in process.values():
        return None
    launches = _launches(events)
    converted: list[Event] = []
    for event in events:
        if event.get("ph") != "X":
            continue
        if (found := _work(event, process.get(event.get("pid")))) is None:
            converted.append(event)
            continue
        number = len(converted)
        converted.append({**event, **found, "args": {"correlation": number}})
        for operator in launches.get(_moment(event), ()):
            launch = {**operator, "ph": "X", "cat": "launch", "dur": 0, "args": {"correlation": number}}
            converted.append(launch)
    return converted


def _name(event: Event) -> str:
    return str((event.get("args") or {}).get("name", ""))


def _moment(event: Event) -> tuple[Any, Any, str]:
    """Return the track and the start of an event. A flow ends at those of the task to which it leads."""
    return event.get("pid"), event.get("tid"), str(event.get("ts")).strip()


def _launches(events: list[Event]) -> dict[tuple[Any, Any, str], list[Event]]:
    """Return the flows' starts on the host by track and start of the task on the device."""
    flows = [e for e in events if e.get("name") == "torch_to_npu"]
    # Several flows may have the same id. The end of a flow follows its start.
    starts: dict[Any, Event] = {}
    found: dict[tuple[Any, Any, str], list[Event]] = {}
    for flow in flows:
        if flow.get("ph") == "s":
            starts[flow.get("id")] = flow
        elif flow.get("ph") == "f" and flow.get("id") in starts:
            found.setdefault(_moment(flow), []).append(starts[flow.get("id")])
    return found


def _work(event: Event, process: str | None) -> Event | None:
    """Return Kineto's category, and a name if the event's is unclear; None for events of the host."""
    name = str(event.get("name", ""))
    if process in _COMMUNICATION:
        return {"cat": "kernel"} if name.startswith("hcom") else None  # others are parts of an operator
    if process != _DEVICE:
        return None
    task = str((event.get("args") or {}).get("Task Type", "")).upper()
    if "WAIT" in task:
        return {"cat": "kernel", "name": task}
    if any(part in task for part in _COPIES):
        return {"cat": "gpu_memcpy"}
    return {"cat": "kernel"} if any(part in task for part in _COMPUTES) else None
