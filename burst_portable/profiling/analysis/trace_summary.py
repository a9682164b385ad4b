"""Summarize the trace of a rank's kernels: time by location in the plan, partition and contention."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from burst_portable.profiling.event_tables import KernelTrace, Table
from burst_portable.profiling.intervals import Timeline, contention, union, with_unit


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
