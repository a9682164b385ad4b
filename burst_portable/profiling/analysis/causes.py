"""Who waits for whom, and why: every wait is followed to what was going on where it came from.

A rank waits for a message::

    receiver   ...compute |---- late ----|---- on its way ----| compute...
    sender     .................compute  | post
                                         ^ both ends have posted

What is *on its way* is the link's. While it is *late*, the sender has not even posted it: what the sender did in
that time is the cause, and where it was waiting itself, the search goes on at the rank that it waited for. So the
slow rank or the slow link is found, and not the neighbour who passed the delay on.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from burst_portable.profiling.analysis.matching import Messages
from burst_portable.profiling.intervals import union
from burst_portable.profiling.records import RankRecords, Table


class Cause(NamedTuple):
    """What cost time.

    kind: "compute" (kernels of a rank), "host" (a rank between its kernels), "outside" (a rank not in attention),
    "link" (bytes on their way from rank to peer), "collective" (ranks that share heads exchanging at once), "agreement"
    (all ranks asking whether they agree: a few bytes, so that no size of a message is to blame).
    """

    kind: str
    rank: int = -1
    peer: int = -1


class Segment(NamedTuple):
    """A piece of a rank's time: `late` names the rank that it waits for; otherwise `cause` says what goes on."""

    start: int
    end: int
    cause: Cause
    late: int = -1


_COLLECTIVE = ("iteration", "call", "backward", "ordinal", "agreement")
Waits = dict[Cause, dict[int, int]]
"""Nanoseconds that each rank waited, by cause."""


@dataclass
class _Rank:
    segments: list[Segment] = field(default_factory=list)
    passes: list[tuple[int, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.segments.sort()
        self._ends = [s.end for s in self.segments]
        self._pass_starts = [p[0] for p in self.passes]

    def between(self, start: int, end: int) -> list[Segment]:
        """Segments that lie in a time, cut to it."""
        found, at = [], bisect_right(self._ends, start)
        while at < len(self.segments) and self.segments[at].start < end:
            s = self.segments[at]
            found.append(s._replace(start=max(s.start, start), end=min(s.end, end)))
            at += 1
        return found

    def inside(self, start: int, end: int) -> int:
        """Nanoseconds of a time that lie in some pass of an attention."""
        at = max(0, bisect_right(self._pass_starts, start) - 1)
        held = 0
        while at < len(self.passes) and self.passes[at][0] < end:
            held += max(0, min(end, self.passes[at][1]) - max(start, self.passes[at][0]))
            at += 1
        return held


def find_causes(records: Sequence[RankRecords], messages: Messages) -> Waits:
    """Every wait of every rank, by cause. The records are on one clock."""
    segments: dict[int, list[Segment]] = {one.rank: _computing(one) for one in records}
    _add_messages(segments, messages)
    add_collectives(segments, records)
    ranks = {one.rank: _Rank(_disjoint(segments[one.rank]), passes_of(one)) for one in records}
    waits: Waits = defaultdict(lambda: defaultdict(int))
    for rank, own in ranks.items():
        for segment in own.segments:
            if segment.late >= 0:
                _follow(ranks, segment.late, segment.start, segment.end, rank, waits, len(ranks))
            elif segment.cause.kind != "compute":
                waits[segment.cause][rank] += segment.end - segment.start
    return {cause: dict(who) for cause, who in waits.items()}


def _follow(
    ranks: dict[int, _Rank], rank: int, start: int, end: int, waiting: int, waits: Waits, hops_left: int
) -> None:
    """What a rank did between two times, noted as what `waiting` waited for."""
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


def _computing(one: RankRecords) -> list[Segment]:
    spans = union(one.table("compute").spans()).tolist()
    return [Segment(start, end, Cause("compute", one.rank)) for start, end in spans]


def _add_messages(segments: dict[int, list[Segment]], messages: Messages) -> None:
    """Waits at both ends: late until the other end has posted, on its way from then on."""
    for end, rank, peer in (
        (messages.receive, messages.target, messages.source),
        (messages.send, messages.source, messages.target),
    ):
        ready = np.clip(messages.ready, end["start"], end.until)
        columns = (rank, peer, messages.source, messages.target, end["start"], ready, end.until)
        for mine, other, source, target, start, both, stop in np.stack(columns, axis=1).tolist():
            link = Cause("link", source, target)
            if both > start:
                segments[mine].append(Segment(start, both, link, other))
            if stop > both:
                segments[mine].append(Segment(both, stop, link))


def add_collectives(segments: dict[int, list[Segment]], records: Sequence[RankRecords]) -> None:
    """The others wait for the last rank to come; from then on, all exchange."""
    together: dict[tuple[int, ...], list[tuple[int, int, int]]] = defaultdict(list)
    for one in records:
        table = one.table("collective")
        for (start, end), key in zip(table.spans().tolist(), _collective_keys(one, table), strict=True):
            together[key].append((start, end, one.rank))
    for key, group in together.items():
        last, _, late = max(group)
        cause = Cause("agreement" if key[-1] else "collective")
        for start, end, rank in group:
            split = min(max(start, last), end)
            if split > start:
                segments[rank].append(Segment(start, split, cause, late))
            if end > split:
                segments[rank].append(Segment(split, end, cause))


def _collective_keys(one: RankRecords, table: Table) -> list[tuple[int, ...]]:
    """What identifies the rows of one collective on all of its ranks; the last number says whether it is an agreement.

    Agreements are among all ranks, exchanges among those of a node that share heads out.
    """
    shares = {(iteration, call): one.plans[plan].get("head_parallel_size", 0) for iteration, call, plan in one.calls}
    keys = []
    for *place, agreement in np.stack([table[name] for name in _COLLECTIVE], axis=1).tolist():
        head_parallel_size = 0 if agreement else shares.get((place[0], place[1]), 0)
        keys.append((*place, one.rank // head_parallel_size if head_parallel_size else 0, agreement))
    return keys


def _disjoint(segments: list[Segment]) -> list[Segment]:
    """Segments in order, cut so that none overlaps the next (a host does one thing at a time; clocks drift)."""
    segments.sort()
    cut = [a._replace(end=min(a.end, b.start)) for a, b in pairwise(segments)]
    return [s for s in (*cut, *segments[-1:]) if s.end > s.start]


def passes_of(one: RankRecords) -> list[tuple[int, int]]:
    """From when to when each pass of each attention went on this rank, in order."""
    rows = []
    for table in one.tables.values():
        if len(table):
            place = [table[name] for name in ("iteration", "call", "backward")]
            rows.append(np.stack((*place, table["start"], table["end"]), axis=1))
    if not rows:
        return []
    every = np.concatenate(rows)
    _, group = np.unique(every[:, :3], axis=0, return_inverse=True)
    order = np.argsort(group, kind="stable")
    first = np.flatnonzero(np.diff(group[order], prepend=-1))
    starts = np.minimum.reduceat(every[order, 3], first)
    ends = np.maximum.reduceat(every[order, 4], first)
    return sorted(zip(starts.tolist(), ends.tolist(), strict=True))
