"""Find the cause of every wait by following it to the rank or link that delayed it.

A rank waits for a message::

    receiver   ...compute | wait for sender | wait for transfer | compute...
    sender     ...................compute   | post
                                            ^ both ends have posted

The link is the cause of the wait for the transfer. During the wait for the sender, the cause is the activity of the
sender. If the sender was waiting too, the search continues at the rank that it waited for. So the slow rank or link is
found, not the neighbor that passed the delay on.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from burst_portable.profiling.analysis.matching import Messages
from burst_portable.profiling.event_tables import COLUMNS, RankRecords, Table
from burst_portable.profiling.intervals import Intervals, extents, union


class Cause(NamedTuple):
    """A cause of waits.

    Attributes:
        kind: One of six words. "compute": kernels of a rank. "host": a rank between its kernels. "outside": a rank
            outside of attention. "link": a transfer from `rank` to `peer`. "collective": an exchange of ranks that
            share heads. "agreement": the check that all ranks make the same call, which sends a few bytes.
        rank: The delaying rank or the source of the link; -1 for all ranks.
        peer: The target of the link; -1 otherwise.
    """

    kind: str
    rank: int = -1
    peer: int = -1


class Segment(NamedTuple):
    """A part of a rank's time with its cause. `late` is the rank that it waits for, -1 if there is none."""

    start: int
    end: int
    cause: Cause
    late: int = -1


_COLLECTIVE = ("train_step", "attention_call", "backward", "ordinal", "agreement")
Waits = dict[Cause, dict[int, int]]
"""Nanoseconds that each rank waited, by cause."""


@dataclass
class _Rank:
    segments: list[Segment] = field(default_factory=list)
    passes: list[list[int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.segments.sort()
        self._ends = [s.end for s in self.segments]
        self._pass_starts = [p[0] for p in self.passes]

    def between(self, start: int, end: int) -> list[Segment]:
        """Return the segments of a time span, clipped to it."""
        found, at = [], bisect_right(self._ends, start)
        while at < len(self.segments) and self.segments[at].start < end:
            s = self.segments[at]
            found.append(s._replace(start=max(s.start, start), end=min(s.end, end)))
            at += 1
        return found

    def inside(self, start: int, end: int) -> int:
        """Return the nanoseconds of a time span that lie in passes of attention."""
        at = max(0, bisect_right(self._pass_starts, start) - 1)
        inside = 0
        while at < len(self.passes) and self.passes[at][0] < end:
            inside += max(0, min(end, self.passes[at][1]) - max(start, self.passes[at][0]))
            at += 1
        return inside


def find_causes(records: Sequence[RankRecords], messages: Messages) -> list[dict[str, Any]]:
    """Return the causes of all waits with the nanoseconds that each rank waited. The records must be on one clock."""
    segments: dict[int, list[Segment]] = {}
    for one in records:
        kernels = union(one.table("compute").spans()).tolist()
        segments[one.rank] = [Segment(start, end, Cause("compute", one.rank)) for start, end in kernels]
    _add_messages(segments, messages)
    add_collectives(segments, records)
    ranks = {one.rank: _Rank(_disjoint(segments[one.rank]), passes_of(one).tolist()) for one in records}
    waits: Waits = defaultdict(lambda: defaultdict(int))
    for rank, timeline in ranks.items():
        for segment in timeline.segments:
            if segment.late >= 0:
                _follow(ranks, segment.late, segment.start, segment.end, rank, waits, len(ranks))
            elif segment.cause.kind != "compute":
                waits[segment.cause][rank] += segment.end - segment.start
    found = [
        {**cause._asdict(), "wait_ns": {str(rank): ns for rank, ns in by_rank.items()}}
        for cause, by_rank in waits.items()
    ]
    return sorted(found, key=lambda one: -max(one["wait_ns"].values()))


def _follow(
    ranks: dict[int, _Rank], rank: int, start: int, end: int, waiting: int, waits: Waits, hops_left: int
) -> None:
    """Add what `rank` did between two times to the causes of the wait of rank `waiting`."""
    at = start
    for segment in (*ranks[rank].between(start, end), Segment(end, end, Cause("end"))):
        if segment.start > at:  # neither in a kernel nor waiting
            inside = ranks[rank].inside(at, segment.start)
            for kind, took in (("host", inside), ("outside", segment.start - at - inside)):
                if took:
                    waits[Cause(kind, rank)][waiting] += took
        if segment.late >= 0 and hops_left:
            _follow(ranks, segment.late, segment.start, segment.end, waiting, waits, hops_left - 1)
        elif segment.end > segment.start:
            waits[segment.cause][waiting] += segment.end - segment.start
        at = max(at, segment.end)


def _add_wait(segments: list[Segment], start: int, ready: int, end: int, cause: Cause, late: int) -> None:
    """Add a wait for a rank until both ends are ready, then for the transfer."""
    split = min(max(start, ready), end)
    if split > start:
        segments.append(Segment(start, split, cause, late))
    if end > split:
        segments.append(Segment(split, end, cause))


def _add_messages(segments: dict[int, list[Segment]], messages: Messages) -> None:
    """Add the waits at both ends: for the other end until it has posted, then for the transfer."""
    for end, rank, peer in (
        (messages.receive, messages.target, messages.source),
        (messages.send, messages.source, messages.target),
    ):
        columns = (rank, peer, messages.source, messages.target, end["start"], messages.ready, end.wait_end)
        for waiting, other, source, target, start, ready, stop in np.stack(columns, axis=1).tolist():
            _add_wait(segments[waiting], start, ready, stop, Cause("link", source, target), other)


def add_collectives(segments: dict[int, list[Segment]], records: Sequence[RankRecords]) -> None:
    """Add the waits in collectives: for the last rank until it arrives, then for the exchange."""
    groups: dict[tuple[int, ...], list[tuple[int, int, int]]] = defaultdict(list)
    for one in records:
        table = one.table("collective")
        for (start, end), key in zip(table.spans().tolist(), _collective_keys(one, table), strict=True):
            groups[key].append((start, end, one.rank))
    for key, group in groups.items():
        last, _, late = max(group)
        cause = Cause("agreement" if key[-1] else "collective")
        for start, end, rank in group:
            _add_wait(segments[rank], start, last, end, cause, late)


def _collective_keys(one: RankRecords, table: Table) -> list[tuple[int, ...]]:
    """Return a key for each row, equal on all ranks of a collective; its last number is 1 for an agreement.

    Agreements include all ranks, exchanges only the ranks that share heads.
    """
    shares = {
        (train_step, call): (one.plans[plan].get("head_parallel_size", 0), one.plans[plan].get("head_spacing", 1))
        for train_step, call, plan in one.calls
    }
    keys = []
    for *location, agreement in np.stack([table[name] for name in _COLLECTIVE], axis=1).tolist():
        size, spacing = (0, 1) if agreement else shares.get((location[0], location[1]), (0, 1))
        first = one.rank - one.rank // spacing % size * spacing if size else 0  # of the ranks that share heads
        keys.append((*location, first, agreement))
    return keys


def _disjoint(segments: list[Segment]) -> list[Segment]:
    """Return the segments in order, clipped so that none overlaps the next. Clock drift can make them overlap."""
    segments.sort()
    cut = [a._replace(end=min(a.end, b.start)) for a, b in pairwise(segments)]
    return [s for s in (*cut, *segments[-1:]) if s.end > s.start]


def passes_of(one: RankRecords) -> Intervals:
    """Return start and end of each pass of each attention on this rank, ``[n, 2]``, in order."""
    tables = [one.table(kind) for kind in COLUMNS]
    keys = np.concatenate([table.locations[:, :3] for table in tables])
    _, _, passes = extents(keys, np.concatenate([table.spans() for table in tables]))
    return passes[np.lexsort(passes[:, ::-1].T)]
