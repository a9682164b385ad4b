"""The partition: every nanosecond of a rank's window is exactly one of four things.

::

    span = compute + exposed communication + exposed copies + idle

    compute               |U(compute)|
    exposed communication |U(comm) \\ U(compute)|                 an upper bound of what communication costs
    exposed copies        |U(copy) \\ U(compute) \\ U(comm)|
    idle                  span - |U(all)|
    overlap               |U(compute) ∩ U(comm)|                 also as a share of |U(comm)|
    blocking              |U(waits) \\ U(compute)|                part of exposed: the next kernel stands waiting

U is the union of intervals, all in whole nanoseconds, so the four add up exactly: in the whole window, and in every
piece that it is cut into.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from burst_portable.profiling.intervals import Intervals, intersect, subtract, union, within

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
