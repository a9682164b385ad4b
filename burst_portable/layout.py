"""Layouts: which global positions a rank holds, as arithmetic progressions. Four ranks::

    contiguous      0000 1111 2222 3333
    zigzag          00 11 22 33 33 22 11 00      rank r holds chunks r and 2W-1-r: causal work is even
    striped         0123 0123 0123 0123          position p lies on rank p mod W
    document_zigzag a zigzag of its own for every document
    whole_documents each document on one rank; a few, the longest, as zigzags, so that work and rows are even

Lengths that the ranks (or twice the ranks) do not divide give uneven shards; nothing is padded.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from heapq import heapify, heapreplace
from itertools import chain, pairwise
from math import gcd

from burst_portable.errors import LayoutError, explain, shown, unknown_name
from burst_portable.mask import Mask
from burst_portable.values import as_int, size

MOST_RANKS = 1 << 14
"""Planning one rank looks at every other; above so many it takes minutes, see docs/plans.md."""

_BLOCK = 128  # rows that kernels take at once: chunks of so many times some leave no block half empty
_UNEVEN = 1.03  # what the busiest rank may have of the mean, before another document is cut


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
            raise LayoutError(explain("this is no segment", got=self, allowed="start and count >= 0, step >= 1"))

    @property
    def last(self) -> int:
        """The last position that it holds."""
        return self.start + (self.count - 1) * self.step

    def positions(self) -> range:
        """Its positions, in order."""
        return range(self.start, self.start + self.count * self.step, self.step)

    def within(self, start: int, stop: int) -> tuple[int, int]:
        """The local indices [first, past) whose positions lie in [start, stop)."""
        if self.step == 1:  # as most are, and many are asked
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
        both = self.step * turns  # from one shared position to the next, were they endless
        position += -((position - max(self.start, other.start)) // both) * both
        return position <= min(self.last, other.last)


@dataclass(frozen=True)
class Layout:
    """The segments of every rank, in the order in which the rank's rows lie in memory.

    Raises `LayoutError` unless each of the positions 0 to length - 1 lies on one rank, and each rank holds some.
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

    def joined(self) -> Layout:
        """All shards on one rank, one after the other: what a rank holds after an all-gather."""
        return Layout(f"joined {self.name}", self.length, (tuple(s for shard in self.shards for s in shard),))


# ----------------------------------------------------------------------------------------- constructors


def contiguous(length: int, ranks: int) -> Layout:
    """Rank r holds the r-th of `ranks` pieces."""
    return Layout("contiguous", length, tuple(_merged([_chunk(length, ranks, r)]) for r in range(ranks)))


def zigzag(length: int, ranks: int) -> Layout:
    """Rank r holds chunks r and 2W-1-r of 2W (Zhu, ring-flash-attention; Llama 3, section 3.3.2)."""
    pieces = 2 * ranks
    return Layout(
        "zigzag",
        length,
        tuple(_merged([_chunk(length, pieces, r), _chunk(length, pieces, pieces - 1 - r)]) for r in range(ranks)),
    )


def striped(length: int, ranks: int) -> Layout:
    """Rank r holds every W-th position from r (Striped Attention, arXiv 2311.09431)."""
    return Layout("striped", length, tuple((Segment(r, len(range(r, length, ranks)), ranks),) for r in range(ranks)))


def document_zigzag(cumulative: Sequence[int], ranks: int) -> Layout:
    """A zigzag of its own for every document, so that packed causal work is even."""
    pieces = 2 * ranks
    shards = []
    for rank in range(ranks):
        mine = []
        for start, stop in pairwise(cumulative):
            for piece in (rank, pieces - 1 - rank):
                chunk = _chunk(stop - start, pieces, piece)
                mine.append(Segment(start + chunk.start, chunk.count))
        shards.append(_merged(mine))
    return Layout("document_zigzag", cumulative[-1], tuple(shards))


def whole_documents(cumulative: Sequence[int], ranks: int) -> Layout:
    """Documents dealt out whole, so that little is sent; the longest cut into zigzags, as few as evenness wants.

    Of the pairs of a causal mask, and of the rows, the busiest rank has 3 % above the mean at most, if documents that
    are long enough allow it: chunks of what is cut are whole blocks of kernels, in short sequences at least a sixteenth
    of a rank's rows. They come first on their rank, side by side: what others need is one range.
    """
    longest = sorted(pairwise(cumulative), key=lambda d: (d[0] - d[1], d))
    chunk = max(1, min(_BLOCK, cumulative[-1] // (16 * ranks)))
    dealt = _evenest(longest, ranks, 2 * ranks * chunk)
    if dealt.idle:  # fewer long documents than ranks: smaller chunks are better than nothing to do
        dealt = _evenest(longest, ranks, 2 * ranks)
    return Layout("whole_documents", cumulative[-1], dealt.shards)


def _evenest(documents: Sequence[tuple[int, int]], ranks: int, shortest: int) -> _Dealt:
    """Dealt out with a few cut, none that is shorter than so many rows."""
    most = sum(stop - start >= shortest for start, stop in documents)
    cut, best = 0, _Dealt(documents, 0, ranks)
    while best.uneven > _UNEVEN and cut < most:
        cut = min(most, cut + 1 + cut // 8)
        best = min(best, _Dealt(documents, cut, ranks), key=lambda dealt: dealt.uneven)
    return best


class _Dealt:
    """Documents shared out to ranks, the first `cut` of them as zigzags; the others to who has least so far."""

    def __init__(self, documents: Sequence[tuple[int, int]], cut: int, ranks: int) -> None:
        self._pairs, self._rows = [0] * ranks, [0] * ranks
        self._all = sum((b - a) ** 2 for a, b in documents), sum(b - a for a, b in documents)
        chunks: list[list[Segment]] = [[] for _ in range(ranks)]
        rests: list[tuple[int, int, int]] = []  # first row of its document, its own first, past its last
        for index, (start, stop) in enumerate(documents[:cut]):
            block = min(_BLOCK, (stop - start) // (2 * ranks))
            blocks = (stop - start) // block
            for turn in range(ranks):
                rank = (turn + index) % ranks  # some chunks are a block longer: not always the same ranks'
                for piece in (turn, 2 * ranks - 1 - turn):
                    chunk = _chunk(blocks, 2 * ranks, piece)
                    first, past = (start + at * block for at in (chunk.start, chunk.start + chunk.count))
                    chunks[rank].append(self._give(rank, start, first, past))
            rests.append((start, start + blocks * block, stop))
        whole: list[list[Segment]] = [[] for _ in range(ranks)]
        least = [(self._load(rank), rank) for rank in range(ranks)]
        heapify(least)
        for start, first, stop in (*rests, *((a, a, b) for a, b in documents[cut:])):
            if first < stop:
                rank = least[0][1]
                (whole if first == start else chunks)[rank].append(self._give(rank, start, first, stop))
                heapreplace(least, (self._load(rank), rank))
        self.shards = tuple(_merged([*chunks[r], *sorted(whole[r], key=_start)]) for r in range(ranks))
        self.uneven = max(
            max(held) * ranks / every for held, every in zip((self._pairs, self._rows), self._all, strict=True)
        )
        self.idle = not all(self._rows)

    def _give(self, rank: int, start: int, first: int, past: int) -> Segment:
        """Rows [first, past) of a document that begins at `start`."""
        self._pairs[rank] += (past - start) ** 2 - (first - start) ** 2
        self._rows[rank] += past - first
        return Segment(first, past - first)

    def _load(self, rank: int) -> int:
        """The larger of its shares of all pairs and of all rows."""
        return max(self._pairs[rank] * self._all[1], self._rows[rank] * self._all[0])


LAYOUTS: dict[str, Callable[[int, int], Layout]] = {
    "contiguous": contiguous,
    "zigzag": zigzag,
    "striped": striped,
}
OF_DOCUMENTS: dict[str, Callable[[Sequence[int], int], Layout]] = {
    "document_zigzag": document_zigzag,
    "whole_documents": whole_documents,
}
NAMES = (*LAYOUTS, *OF_DOCUMENTS)


def make_layout(name: str, length: int, ranks: int, mask: Mask | None = None) -> Layout:
    """The layout of that name; `OF_DOCUMENTS` read the documents from the mask.

    Raises `UnknownNameError` for a name that is none, `InputError` for sizes that are none, `LayoutError` for lengths
    and ranks that do not fit.
    """
    # Checked outside the cache, where 2, 2.0 and True would find each other's layouts.
    length, ranks = size("length", length), size("ranks", ranks)
    if not isinstance(name, str) or name not in NAMES:
        raise unknown_name("layout", name, NAMES)
    if not isinstance(mask, Mask | None):
        raise LayoutError(explain("a layout reads documents from a Mask", got=shown(mask)))
    return _made(name, length, ranks, mask)


def suited(mask: Mask, length: int, ranks: int) -> Iterator[Layout]:
    """Layouts that may be the best for a mask; the first is taken where nothing speaks for another."""
    yield make_layout("zigzag", length, ranks)
    if ranks > 1:
        yield make_layout("contiguous", length, ranks)
    if ranks > 1 and len(mask.regions) > 1:
        for name in OF_DOCUMENTS:
            try:
                yield make_layout(name, length, ranks, mask)
            except LayoutError:  # these regions are no documents, or too few
                continue


@lru_cache(maxsize=256)
def _made(name: str, length: int, ranks: int, mask: Mask | None) -> Layout:
    _check_ranks(name, ranks)
    if length < ranks:
        raise LayoutError(
            explain(
                "more ranks than tokens",
                got=f"{ranks} ranks for {length} tokens",
                allowed=f"at most {length} ranks",
            )
        )
    if name in OF_DOCUMENTS:
        return OF_DOCUMENTS[name](_document_bounds(name, mask, length), ranks)
    return LAYOUTS[name](length, ranks)


def _document_bounds(name: str, mask: Mask | None, length: int) -> tuple[int, ...]:
    """Where documents end: the square regions on the diagonal that tile the sequence."""
    bounds = [0]
    for region in mask.regions if mask is not None else ():
        if (region.q_start, region.q_stop) != (region.k_start, region.k_stop) or region.q_start != bounds[-1]:
            break
        bounds.append(min(region.q_stop, length))
    if bounds[-1] != length:
        raise LayoutError(
            explain(
                f"the layout {name!r} needs a mask of documents that fill the sequence",
                got=f"the mask {str(mask)!r} and {length} tokens",
                next_step="pass Mask.documents(...), or use the layout 'zigzag'",
            )
        )
    return tuple(bounds)


def _chunk(length: int, pieces: int, index: int) -> Segment:
    """Piece `index` of a length; the first `length mod pieces` are one longer, so that no rank goes empty."""
    size, longer = divmod(length, pieces)
    return Segment(index * size + min(index, longer), size + (index < longer))


def _merged(segments: list[Segment]) -> tuple[Segment, ...]:
    """Without empty segments, and with neighbours joined."""
    out: list[Segment] = []
    for s in segments:
        if not s.count:
            continue
        if out and out[-1].start + out[-1].count == s.start:
            out[-1] = Segment(out[-1].start, out[-1].count + s.count)
        else:
            out.append(s)
    return tuple(out)


# ------------------------------------------------------------------------------------ checks of what is made by hand


def _listed(shards: Iterable[Iterable[Segment]]) -> tuple[tuple[Segment, ...], ...]:
    """Tuples of the segments that hold anything."""
    try:
        listed = [tuple(shard) for shard in shards]
    except TypeError:
        raise LayoutError(explain("a layout takes a list of segments for every rank", got=shown(shards))) from None
    for s in chain.from_iterable(listed):
        if not isinstance(s, Segment):
            raise LayoutError(explain("a layout is made of segments", got=shown(s), allowed="Segment"))
    return tuple(tuple(s for s in shard if s.count) for shard in listed)


def _check_ranks(name: str, ranks: int) -> None:
    if ranks > MOST_RANKS:
        raise LayoutError(
            explain(f"the layout {name!r} has too many ranks", got=ranks, allowed=f"at most {MOST_RANKS}")
        )


def _check_partition(layout: Layout) -> None:
    """Every position on one rank, every rank with some. Segments are counted and compared, positions never listed."""
    what = f"the layout {layout.name!r}"
    if not isinstance(layout.length, int) or layout.length < 1 or not layout.shards:
        raise LayoutError(
            explain(f"{what} needs ranks and tokens", got=f"{layout.ranks} ranks, {layout.length} tokens")
        )
    _check_ranks(layout.name, layout.ranks)
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
    tracks: dict[tuple[int, int], list[Segment]] = defaultdict(list)  # on one of them, segments are intervals
    for s in segments:
        tracks[s.step, s.start % s.step].append(s)
    for track in tracks.values():
        track.sort(key=_start)
        for a, b in pairwise(track):
            if b.start <= a.last:
                return a, b
    if len({step for step, _ in tracks}) == 1:
        return None
    begun: dict[int, list[Segment]] = defaultdict(list)  # by step, in a sweep over the sequence
    for s in sorted(segments, key=_start):
        for step in [step for step in begun if step != s.step]:
            begun[step] = [other for other in begun[step] if other.last >= s.start]
            for other in begun[step]:
                if s.meets(other):
                    return other, s
        begun[s.step].append(s)
    return None


def _start(segment: Segment) -> int:
    return segment.start
