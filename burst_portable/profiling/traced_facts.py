"""What is reckoned from a tracer's events: time by place of the plan, the partition, contention."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from burst_portable.profiling.contention import contention
from burst_portable.profiling.intervals import union
from burst_portable.profiling.partition import Timeline
from burst_portable.profiling.record import Table
from burst_portable.profiling.traced import Traced


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
