"""Sets of times as sorted, disjoint intervals: int64 arrays ``[n, 2]`` of nanoseconds, each ``[start, stop)``.

A million intervals take a fraction of a second: everything is a sort or a bisection, and what was recorded in order
is not sorted again.
"""

from __future__ import annotations

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
