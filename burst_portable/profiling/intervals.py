"""Compute with sets of times: sorted, disjoint intervals ``[start, stop)``, int64 arrays ``[n, 2]`` of nanoseconds.

A million intervals take a fraction of a second: every function sorts or bisects, and sorted input is not sorted again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

Intervals = NDArray[np.int64]
T = TypeVar("T")


def union(spans: Intervals) -> Intervals:
    """Return the times that lie in any span. Spans may overlap, be empty and come in any order."""
    spans = np.asarray(spans, dtype=np.int64).reshape(-1, 2)
    full = spans[:, 1] > spans[:, 0]
    spans = spans if full.all() else spans[full]
    if not len(spans):
        return spans
    # A new interval begins where as many spans have ended as have started. So starts and stops can be sorted
    # separately, which is much faster than sorting pairs.
    starts, stops = _ascending(spans[:, 0]), _ascending(spans[:, 1])
    first = np.concatenate(([True], starts[1:] > stops[:-1]))
    last = np.concatenate((first[1:], [True]))
    found = np.empty((int(first.sum()), 2), dtype=np.int64)
    found[:, 0], found[:, 1] = starts[first], stops[last]
    return found


def _ascending(times: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the times in order. A stable sort is a merge sort, which is fast for nearly sorted input."""
    return times if (times[1:] >= times[:-1]).all() else np.sort(times, kind="stable")


def intersect(a: Intervals, b: Intervals) -> Intervals:
    """Return the times that are in both sets."""
    from_, past = np.searchsorted(b[:, 1], a[:, 0], "right"), np.searchsorted(b[:, 0], a[:, 1], "left")
    counts = np.maximum(past - from_, 0)
    left = np.repeat(np.arange(len(a)), counts)
    nth = np.arange(len(left)) - np.repeat(np.cumsum(counts) - counts, counts)
    right = np.repeat(from_, counts) + nth
    return np.stack((np.maximum(a[left, 0], b[right, 0]), np.minimum(a[left, 1], b[right, 1])), axis=1)


def subtract(a: Intervals, b: Intervals) -> Intervals:
    """Return the times of the first set that are not in the second."""
    if not len(a) or not len(b):
        return a
    ends = np.array([min(a[0, 0], b[0, 0]), max(a[-1, 1], b[-1, 1])])
    gaps = np.stack((np.concatenate((ends[:1], b[:, 1])), np.concatenate((b[:, 0], ends[1:]))), axis=1)
    return intersect(a, gaps[gaps[:, 1] > gaps[:, 0]])


def total(a: Intervals) -> int:
    """Return the nanoseconds in the set."""
    return int((a[:, 1] - a[:, 0]).sum())


def measure(a: Intervals, windows: Intervals) -> NDArray[np.int64]:
    """Return the nanoseconds of the set in each window. Windows may overlap and come in any order."""
    if not len(a):
        return np.zeros(len(windows), dtype=np.int64)
    before = np.concatenate(([0], np.cumsum(a[:, 1] - a[:, 0])))

    def up_to(times: NDArray[np.int64]) -> NDArray[np.int64]:
        index = np.searchsorted(a[:, 0], times, "right")
        inside = np.minimum(times, a[np.maximum(index - 1, 0), 1]) - a[np.maximum(index - 1, 0), 0]
        return np.where(index == 0, 0, before[np.maximum(index - 1, 0)] + inside)

    return up_to(windows[:, 1]) - up_to(windows[:, 0])


def extents(keys: NDArray[np.int64], spans: Intervals) -> tuple[NDArray[np.int64], NDArray[np.int64], Intervals]:
    """Return the distinct keys in order, the index of each row's key, and first start and last end of spans by key."""
    distinct, group = np.unique(keys, axis=0, return_inverse=True)
    group = group.reshape(-1)
    order = np.argsort(group, kind="stable")
    first = np.flatnonzero(np.diff(group[order], prepend=-1))
    starts, ends = np.minimum.reduceat(spans[order, 0], first), np.maximum.reduceat(spans[order, 1], first)
    return distinct, group, np.stack((starts, ends), axis=1)


PARTS = ("compute", "exposed_comm", "exposed_copy", "idle")
FIELDS = ("span", *PARTS, "comm", "overlap", "blocking")
_EMPTY: Intervals = np.zeros((0, 2), dtype=np.int64)


def with_unit(parts: Mapping[str, T]) -> dict[str, T]:
    """Return the parts under their names in JSON, which end with the unit: ``span_ns``."""
    return {f"{name}_ns": value for name, value in parts.items()}


@dataclass(frozen=True)
class Timeline:
    """The time of one rank as sets of intervals, which can be measured in any number of windows."""

    compute: Intervals
    exposed_comm: Intervals
    exposed_copy: Intervals
    comm: Intervals
    overlap: Intervals
    blocking: Intervals

    @classmethod
    def of(cls, compute: Intervals, comm: Intervals, copy: Intervals = _EMPTY, waits: Intervals = _EMPTY) -> Timeline:
        """Build a timeline from spans ``[n, 2]`` in any order; `waits` are the spans of `comm` in which it waits."""
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

    def measure(self, windows: Intervals) -> dict[str, NDArray[np.int64]]:
        """Return the nanoseconds of each of `FIELDS`, one entry per window."""
        sizes = {name: measure(getattr(self, name), windows) for name in FIELDS if name not in ("span", "idle")}
        span = windows[:, 1] - windows[:, 0]
        busy = sizes["compute"] + sizes["exposed_comm"] + sizes["exposed_copy"]
        return {"span": span, "idle": span - busy, **sizes}

    def partition(self) -> dict[str, int]:
        """Return the nanoseconds of each of `FIELDS` in the window from the first to the last event."""
        sizes = self.measure(np.array([self.window], dtype=np.int64))
        return {name: int(sizes[name][0]) for name in FIELDS}


_OVERLAPPED = 0.5  # of a kernel's time: with at least this share of communication, the kernel is overlapped
_ISOLATED = 0.05  # of a kernel's time: with at most this share, it is isolated


def contention(kernels: Intervals, work: NDArray[np.int64], comm: Intervals) -> dict[str, Any] | None:
    """Compare kernels that overlap communication with the same kernels in isolation; None if there are none of either.

    Rows of `work` that are equal do the same work. `comm` is disjoint and sorted. The result has `overlapped` and
    `isolated`, the numbers of kernels compared; `ratio`, the time of overlapped kernels over that of the same isolated
    ones; `lost_ns`, the difference in nanoseconds.
    """
    if not len(kernels):
        return None
    times = kernels[:, 1] - kernels[:, 0]
    shared = measure(comm, kernels) / np.maximum(times, 1)
    is_overlapped, is_isolated = shared >= _OVERLAPPED, shared <= _ISOLATED
    group = np.unique(work, axis=0, return_inverse=True)[1].reshape(-1)
    pairs = ((times[(group == g) & is_overlapped], times[(group == g) & is_isolated]) for g in range(group.max() + 1))
    compared = [(overlapped, isolated) for overlapped, isolated in pairs if len(overlapped) and len(isolated)]
    if not compared:
        return None
    took = sum(int(overlapped.sum()) for overlapped, _ in compared)
    expected = sum(len(overlapped) * float(np.median(isolated)) for overlapped, isolated in compared)
    return {
        "overlapped": sum(len(overlapped) for overlapped, _ in compared),
        "isolated": sum(len(isolated) for _, isolated in compared),
        "ratio": took / expected if expected else 1.0,
        "lost_ns": round(took - expected),
    }


def largest_contention(data: dict[str, Any]) -> dict[str, Any] | None:
    """Return the contention of the rank that loses most, by the tracer if it ran, else by marks; None if unknown."""
    traced = [{"rank": r["rank"], **r["contention"]} for r in data["kernel_trace"] if r["contention"]]
    return max(traced or data["contention"], key=lambda c: c["lost_ns"], default=None)
