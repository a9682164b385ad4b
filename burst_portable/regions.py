"""Regions: boxes of global positions with a band across them, in closed form::

    k_start      k_stop
q_start +----------+        A query q in [q_start, q_stop) sees a key k in [k_start, k_stop)
        |##..      |        where lo <= q - k <= hi.
        |####..    |
        |..####..  |        lo = 0 hides the future; hi = w hides what is more than w back.
 q_stop +----------+
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby

from burst_portable.errors import MaskError, explain, shown
from burst_portable.values import as_int

UNBOUNDED = 1 << 60
"""Stands for "as far as the sequence goes", in ranges and, also negated, in bands."""


def band_area(rows: int, columns: int, lo: int, hi: int) -> int:
    """Cells (i, j) of a rows x columns box with lo <= i - j <= hi, in closed form."""
    return _up_to(rows, columns, hi) - _up_to(rows, columns, lo - 1) if lo <= hi else 0


def _up_to(rows: int, columns: int, bound: int) -> int:
    """Cells with i - j <= bound."""
    if bound <= -columns:
        return 0
    if bound >= rows - 1:
        return rows * columns
    # Column j holds clamp(bound + j + 1, 0, rows) cells: nothing, then a ramp, then all rows.
    start, stop = max(0, -bound - 1), min(columns, rows - bound - 1)
    return (stop - start) * (2 * bound + start + 1 + stop) // 2 + rows * (columns - stop)


@dataclass(frozen=True, slots=True)
class Region:
    """A box of global positions and a band across it: see the drawing above."""

    q_start: int
    q_stop: int
    k_start: int
    k_stop: int
    lo: int = -UNBOUNDED
    hi: int = UNBOUNDED

    def __post_init__(self) -> None:
        for name in ("q_start", "q_stop", "k_start", "k_stop", "lo", "hi"):
            number = as_int(getattr(self, name))
            if number is None:
                raise MaskError(explain(f"{name} of a region must be an int", got=shown(getattr(self, name))))
            object.__setattr__(self, name, number)
        if not (0 <= self.q_start < self.q_stop and 0 <= self.k_start < self.k_stop and self.lo <= self.hi):
            raise MaskError(
                explain("a region is empty or starts before 0", got=self, allowed="0 <= start < stop and lo <= hi")
            )

    def overlaps(self, other: Region) -> bool:
        """Whether some pair (q, k) lies in both, in closed form."""
        q_start, q_stop = max(self.q_start, other.q_start), min(self.q_stop, other.q_stop)
        k_start, k_stop = max(self.k_start, other.k_start), min(self.k_stop, other.k_stop)
        if q_start >= q_stop or k_start >= k_stop:
            return False
        lo, hi = max(self.lo, other.lo, q_start - k_stop + 1), min(self.hi, other.hi, q_stop - 1 - k_start)
        return lo <= hi

    def area(self, q_length: int, k_length: int) -> int:
        """How many pairs it holds in a sequence of these lengths."""
        rows, columns = min(self.q_stop, q_length) - self.q_start, min(self.k_stop, k_length) - self.k_start
        offset = self.q_start - self.k_start
        return band_area(rows, columns, self.lo - offset, self.hi - offset) if rows > 0 and columns > 0 else 0

    def rows(self, length: int) -> tuple[int, int]:
        """[start, stop) of the queries that see one of its keys, in a sequence of this length."""
        if self.k_start >= length:
            return 0, 0
        past = min(self.q_stop, min(self.k_stop, length) + self.hi, length)
        return max(self.q_start, self.k_start + self.lo), past

    def __str__(self) -> str:
        def bound(value: int) -> str:
            return "…" if abs(value) >= UNBOUNDED else str(value)

        band = "" if (self.lo, self.hi) == (-UNBOUNDED, UNBOUNDED) else f" {bound(self.lo)}≤q-k≤{bound(self.hi)}"
        return f"q[{self.q_start}:{bound(self.q_stop)}] k[{self.k_start}:{bound(self.k_stop)}]{band}"


def first_overlap(regions: Iterable[Region]) -> tuple[Region, Region] | None:
    """The first overlapping pair, if any, of regions sorted by q_start: a sweep over q, bisection over k."""
    open_: list[Region] = []  # regions that may share a query with later ones, sorted by k_start
    for q_start, row in groupby(regions, key=lambda r: r.q_start):
        open_ = [r for r in open_ if r.q_stop > q_start]
        widest = max((r.k_stop - r.k_start for r in open_), default=0)
        for region in row:
            first = bisect_left(open_, region.k_start - widest, key=_k_start)
            past = bisect_left(open_, region.k_stop, key=_k_start)
            for other in open_[first:past]:
                if other.overlaps(region):
                    return other, region
            insort(open_, region, key=_k_start)
            widest = max(widest, region.k_stop - region.k_start)
    return None


def _k_start(region: Region) -> int:
    return region.k_start
