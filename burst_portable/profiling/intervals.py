"""Sets of times as sorted, disjoint intervals: int64 arrays ``[n, 2]`` of nanoseconds, each ``[start, stop)``.

A million intervals take a fraction of a second: everything is a sort or a bisection, and what was recorded in order
is not sorted again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Intervals = NDArray[np.int64]


def union(spans: Intervals) -> Intervals:
    """The set of times that lie in any span; spans may overlap, and empty ones hold nothing."""
    spans = np.asarray(spans, dtype=np.int64).reshape(-1, 2)
    full = spans[:, 1] > spans[:, 0]
    spans = spans if full.all() else spans[full]
    if not len(spans):
        return spans
    # A span begins a new interval where as many have ended before it as have started: so starts and stops can be sorted
    # each for themselves, which is far faster than sorting pairs.
    starts, stops = _ascending(spans[:, 0]), _ascending(spans[:, 1])
    first = np.concatenate(([True], starts[1:] > stops[:-1]))
    last = np.concatenate((first[1:], [True]))
    found = np.empty((int(first.sum()), 2), dtype=np.int64)
    found[:, 0], found[:, 1] = starts[first], stops[last]
    return found


def _ascending(times: NDArray[np.int64]) -> NDArray[np.int64]:
    return (
        times if (times[1:] >= times[:-1]).all() else np.sort(times, kind="stable")
    )  # nearly in order: a merge sort sees it


def intersect(a: Intervals, b: Intervals) -> Intervals:
    """Times in both sets."""
    from_, past = np.searchsorted(b[:, 1], a[:, 0], "right"), np.searchsorted(b[:, 0], a[:, 1], "left")
    counts = np.maximum(past - from_, 0)
    left = np.repeat(np.arange(len(a)), counts)
    nth = np.arange(len(left)) - np.repeat(np.cumsum(counts) - counts, counts)
    right = np.repeat(from_, counts) + nth
    return np.stack((np.maximum(a[left, 0], b[right, 0]), np.minimum(a[left, 1], b[right, 1])), axis=1)


def subtract(a: Intervals, b: Intervals) -> Intervals:
    """Times in the first set that are not in the second."""
    if not len(a) or not len(b):
        return a
    ends = np.array([min(a[0, 0], b[0, 0]), max(a[-1, 1], b[-1, 1])])
    gaps = np.stack((np.concatenate((ends[:1], b[:, 1])), np.concatenate((b[:, 0], ends[1:]))), axis=1)
    return intersect(a, gaps[gaps[:, 1] > gaps[:, 0]])


def total(a: Intervals) -> int:
    """Nanoseconds in the set."""
    return int((a[:, 1] - a[:, 0]).sum())


def within(a: Intervals, windows: Intervals) -> NDArray[np.int64]:
    """Nanoseconds of the set in each window; windows may overlap and come in any order."""
    if not len(a):
        return np.zeros(len(windows), dtype=np.int64)
    before = np.concatenate(([0], np.cumsum(a[:, 1] - a[:, 0])))

    def up_to(times: NDArray[np.int64]) -> NDArray[np.int64]:
        index = np.searchsorted(a[:, 0], times, "right")
        inside = np.minimum(times, a[np.maximum(index - 1, 0), 1]) - a[np.maximum(index - 1, 0), 0]
        return np.where(index == 0, 0, before[np.maximum(index - 1, 0)] + inside)

    return up_to(windows[:, 1]) - up_to(windows[:, 0])


PARTS = ("compute", "exposed_comm", "exposed_copy", "idle")
FIELDS = ("span", *PARTS, "comm", "overlap", "blocking")
_EMPTY: Intervals = np.zeros((0, 2), dtype=np.int64)


@dataclass(frozen=True)
class Timeline:
    """One rank's time as sets of intervals: made once, then measured in any number of windows."""

    compute: Intervals
    exposed_comm: Intervals
    exposed_copy: Intervals
    comm: Intervals
    overlap: Intervals
    blocking: Intervals

    @classmethod
    def of(cls, compute: Intervals, comm: Intervals, copy: Intervals = _EMPTY, waits: Intervals = _EMPTY) -> Timeline:
        """From spans ``[n, 2]`` in any order; `waits` are those of `comm` in which the rank stands still."""
        compute, comm, copy = union(compute), union(comm), union(copy)
        exposed = subtract(comm, compute)
        return cls(
            compute,
            exposed,
            subtract(subtract(copy, compute), comm),
            comm,
            intersect(compute, comm),
            intersect(exposed, union(waits)),
        )

    @property
    def window(self) -> tuple[int, int]:
        """First to last event."""
        sets = [s for s in (self.compute, self.exposed_comm, self.exposed_copy) if len(s)]
        return (min(int(s[0, 0]) for s in sets), max(int(s[-1, 1]) for s in sets)) if sets else (0, 0)

    def measured(self, windows: Intervals) -> dict[str, NDArray[np.int64]]:
        """Nanoseconds of each of `FIELDS`, a window per entry."""
        sizes = {name: within(getattr(self, name), windows) for name in FIELDS if name not in ("span", "idle")}
        span = windows[:, 1] - windows[:, 0]
        busy = sizes["compute"] + sizes["exposed_comm"] + sizes["exposed_copy"]
        return {"span": span, "idle": span - busy, **sizes}

    def partition(self) -> dict[str, int]:
        """The partition of the whole window."""
        sizes = self.measured(np.array([self.window], dtype=np.int64))
        return {name: int(sizes[name][0]) for name in FIELDS}


_BESIDE = 0.5  # of a kernel's time: from this share on, communication ran beside it
_ALONE = 0.05  # of a kernel's time: up to this share, it ran alone


def contention(kernels: Intervals, work: NDArray[np.int64], comm: Intervals) -> dict[str, Any] | None:
    """Kernels beside communication compared with the same kernels alone; None if there is nothing to compare.

    Args:
        kernels: from when to when each ran, ``[n, 2]``.
        work: ``[n, any]``; rows that are equal did the same.
        comm: when anything was transferred: disjoint and sorted.

    Returns `beside` and `alone`, the numbers of kernels compared; `ratio`, how much longer the former took; and `lost`,
    the nanoseconds that this comes to.
    """
    if not len(kernels):
        return None
    times = kernels[:, 1] - kernels[:, 0]
    shared = within(comm, kernels) / np.maximum(times, 1)
    beside, alone = shared >= _BESIDE, shared <= _ALONE
    _, group = np.unique(work, axis=0, return_inverse=True)
    group = group.reshape(-1)
    found = [(times[(group == g) & beside], times[(group == g) & alone]) for g in range(group.max() + 1)]
    compared = [(b, a) for b, a in found if len(b) and len(a)]
    if not compared:
        return None
    took = sum(int(b.sum()) for b, _ in compared)
    expected = sum(len(b) * float(np.median(a)) for b, a in compared)
    return {
        "beside": sum(len(b) for b, _ in compared),
        "alone": sum(len(a) for _, a in compared),
        "ratio": took / expected if expected else 1.0,
        "lost": round(took - expected),
    }


def contended(data: dict[str, Any]) -> dict[str, Any] | None:
    """The rank that loses most to communication beside its kernels; None if that is not known.

    The tracer's word counts before that of the marks around kernel calls.
    """
    told = [{"rank": r["rank"], **r["contention"]} for r in data.get("traced", ()) if r["contention"]]
    told = told or list(data.get("contention", ()))
    return max(told, key=lambda c: c["lost"], default=None)
