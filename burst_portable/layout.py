"""Layouts: which global positions a rank holds, as arithmetic progressions. Named layouts are in `layouts`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain, pairwise
from math import gcd

from burst_portable.errors import LayoutError, explain, shown
from burst_portable.opaque import opaque
from burst_portable.values import as_int

MOST_RANKS = 1 << 14
"""Planning one rank looks at every other; with more ranks it takes minutes, see docs/plans.md."""


@dataclass(frozen=True, slots=True)
class Segment:
    """`count` global positions: start, start + step, ..."""

    start: int
    count: int
    step: int = 1

    def __post_init__(self) -> None:
        if not type(self.start) is type(self.count) is type(self.step) is int:
            for name in ("start", "count", "step"):
                number = as_int(getattr(self, name))
                if number is None:
                    raise LayoutError(explain(f"{name} of a segment must be an int", got=shown(getattr(self, name))))
                object.__setattr__(self, name, number)
        if self.start < 0 or self.count < 0 or self.step < 1:
            raise LayoutError(explain("this is not a segment", got=self, allowed="start and count >= 0, step >= 1"))

    @property
    def last(self) -> int:
        """The last position that it holds."""
        return self.start + (self.count - 1) * self.step

    def positions(self) -> range:
        """Its positions, in order."""
        return range(self.start, self.start + self.count * self.step, self.step)

    def within(self, start: int, stop: int) -> tuple[int, int]:
        """The local indices [first, past) whose positions lie in [start, stop)."""
        if self.step == 1:  # the usual case, and called often
            first, past = start - self.start, stop - self.start
            first, past = first if first > 0 else 0, past if past < self.count else self.count
            return first, past if past > first else first
        first = max(0, -((self.start - start) // self.step))  # ceil((start - self.start) / step)
        past = min(self.count, -((self.start - stop) // self.step))
        return first, max(first, past)

    def meets(self, other: Segment) -> bool:
        """Whether both hold some position, in closed form (the Chinese remainder theorem)."""
        common = gcd(self.step, other.step)
        apart, unfit = divmod(other.start - self.start, common)
        if unfit:
            return False
        turns = other.step // common
        position = self.start + self.step * (apart * pow(self.step // common, -1, turns) % turns)
        both = self.step * turns  # from one shared position to the next, if both were endless
        position += -((position - max(self.start, other.start)) // both) * both
        return position <= min(self.last, other.last)


@opaque
@dataclass(frozen=True)
class Layout:
    """The segments of every rank, in the order in which the rank's rows lie in memory.

    Raises `LayoutError` unless each position from 0 to length - 1 lies on one rank, and each rank holds at least one.
    """

    name: str
    length: int
    shards: tuple[tuple[Segment, ...], ...]
    _hash: int = field(init=False, repr=False, compare=False)
    _counts: tuple[int, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not isinstance(self.name, str):
            raise LayoutError(explain("the name of a layout must be a string", got=shown(self.name)))
        object.__setattr__(self, "length", as_int(self.length))
        object.__setattr__(self, "shards", _listed(self.shards))
        _check_partition(self)
        object.__setattr__(self, "_hash", hash((self.length, self.shards)))
        object.__setattr__(self, "_counts", tuple(sum([s.count for s in shard]) for shard in self.shards))

    def __hash__(self) -> int:
        return self._hash

    @property
    def ranks(self) -> int:
        """How many ranks share the sequence."""
        return len(self.shards)

    def count(self, rank: int) -> int:
        """How many positions a rank holds."""
        return self._counts[rank]

    def positions(self, rank: int) -> list[int]:
        """A rank's global positions, in the order of its rows."""
        return [p for s in self.shards[rank] for p in s.positions()]

    def joined(self, each: int | None = None) -> Layout:
        """Each `each` consecutive shards (by default all) joined into one rank's, one after the other."""
        each = each or self.ranks
        groups = (self.shards[first : first + each] for first in range(0, self.ranks, each))
        return Layout(f"joined {self.name}", self.length, tuple(tuple(chain.from_iterable(group)) for group in groups))

    def sorted(self) -> Layout:
        """The same positions on every rank, with segments sorted by their start and adjacent ones merged."""
        shards = (sorted(shard, key=lambda s: s.start) for shard in self.shards)
        return Layout(f"sorted {self.name}", self.length, tuple(map(merged, shards)))


def merged(segments: Iterable[Segment]) -> tuple[Segment, ...]:
    """Segments without empty ones, and with neighbours joined if one continues the other."""
    found: list[Segment] = []
    for s in segments:
        if not s.count:
            continue
        if found and found[-1].step == s.step == 1 and found[-1].last + 1 == s.start:
            found[-1] = Segment(found[-1].start, found[-1].count + s.count)
        else:
            found.append(s)
    return tuple(found)


def _listed(shards: Iterable[Iterable[Segment]]) -> tuple[tuple[Segment, ...], ...]:
    """The shards as tuples, without empty segments."""
    try:
        listed = [tuple(shard) for shard in shards]
    except TypeError:
        raise LayoutError(explain("a layout takes a list of segments for every rank", got=shown(shards))) from None
    for s in chain.from_iterable(listed):
        if not isinstance(s, Segment):
            raise LayoutError(explain("a layout is made of segments", got=shown(s), allowed="Segment"))
    return tuple(tuple(s for s in shard if s.count) for shard in listed)


def check_ranks(name: str, ranks: int) -> None:
    """Raises `LayoutError` for more than `MOST_RANKS`."""
    if ranks > MOST_RANKS:
        raise LayoutError(
            explain(f"the layout {name!r} has too many ranks", got=ranks, allowed=f"at most {MOST_RANKS}")
        )


def _check_partition(layout: Layout) -> None:
    """Refuse a layout unless every position is on one rank and every rank has one. Positions are never listed."""
    what = f"the layout {layout.name!r}"
    if not isinstance(layout.length, int) or layout.length < 1 or not layout.shards:
        raise LayoutError(
            explain(f"{what} needs ranks and tokens", got=f"{layout.ranks} ranks, {layout.length} tokens")
        )
    check_ranks(layout.name, layout.ranks)
    if empty := [rank for rank, shard in enumerate(layout.shards) if not shard]:
        raise LayoutError(
            explain(
                f"{what} leaves ranks without a token",
                got=f"ranks {empty[:8]} of {layout.ranks}, {layout.length} tokens",
                next_step="use fewer ranks, or another layout",
            )
        )
    segments = list(chain.from_iterable(layout.shards))
    held, last = sum(s.count for s in segments), max(s.last for s in segments)
    if last >= layout.length:
        raise LayoutError(
            explain(f"{what} goes past its sequence", got=f"position {last}", allowed=f"0 to {layout.length - 1}")
        )
    if pair := _shared(segments):
        raise LayoutError(
            explain(f"{what} holds a position twice", got=f"{pair[0]} and {pair[1]}", allowed="every position once")
        )
    if held != layout.length:
        raise LayoutError(explain(f"{what} leaves positions out", got=f"{held} of {layout.length}", allowed="all"))


def _shared(segments: Sequence[Segment]) -> tuple[Segment, Segment] | None:
    """Two segments that share a position, if any do."""
    tracks: dict[tuple[int, int], list[Segment]] = defaultdict(list)  # on one track, segments are intervals
    for s in segments:
        tracks[s.step, s.start % s.step].append(s)
    for track in tracks.values():
        track.sort(key=lambda s: s.start)
        for a, b in pairwise(track):
            if b.start <= a.last:
                return a, b
    if len({step for step, _ in tracks}) == 1:
        return None
    begun: dict[int, list[Segment]] = defaultdict(list)  # by step, in a sweep over the sequence
    for s in sorted(segments, key=lambda s: s.start):
        for step in [step for step in begun if step != s.step]:
            begun[step] = [other for other in begun[step] if other.last >= s.start]
            for other in begun[step]:
                if s.meets(other):
                    return other, s
        begun[s.step].append(s)
    return None
