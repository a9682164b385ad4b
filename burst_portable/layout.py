"""Define layouts: the global positions of each rank, as arithmetic progressions."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from heapq import heapify, heapreplace
from itertools import chain, pairwise
from math import gcd

from burst_portable.errors import LayoutError, shown, unknown_name
from burst_portable.mask import Mask, band_area
from burst_portable.utils.values import as_int, hide_dataclass, size

MOST_RANKS = 1 << 14
"""Planning one rank visits every other: with more ranks it takes minutes, see docs/plans.md."""


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
                    raise LayoutError(f"{name} of a segment must be an int", got=shown(getattr(self, name)))
                object.__setattr__(self, name, number)
        if self.start < 0 or self.count < 0 or self.step < 1:
            raise LayoutError("invalid segment", got=self, allowed="start and count >= 0, step >= 1")

    @property
    def last(self) -> int:
        """Last position of the segment."""
        return self.start + (self.count - 1) * self.step

    def positions(self) -> range:
        """Return the positions, in order."""
        return range(self.start, self.start + self.count * self.step, self.step)

    def within(self, start: int, stop: int) -> tuple[int, int]:
        """Return the range [first, past) of local indices whose positions are in [start, stop)."""
        if self.step == 1:  # the usual case, called often
            first, past = start - self.start, stop - self.start
            first, past = first if first > 0 else 0, past if past < self.count else self.count
            return first, past if past > first else first
        first = max(0, -((self.start - start) // self.step))  # ceil((start - self.start) / step)
        past = min(self.count, -((self.start - stop) // self.step))
        return first, max(first, past)

    def meets(self, other: Segment) -> bool:
        """Return whether both contain a position, in closed form (Chinese remainder theorem)."""
        common = gcd(self.step, other.step)
        distance, rest = divmod(other.start - self.start, common)
        if rest:
            return False
        turns = other.step // common
        position = self.start + self.step * (distance * pow(self.step // common, -1, turns) % turns)
        period = self.step * turns  # distance of shared positions, if both were endless
        position += -((position - max(self.start, other.start)) // period) * period
        return position <= min(self.last, other.last)


@hide_dataclass
@dataclass(frozen=True, repr=False)
class Layout:
    """The segments of every rank, in the order of the rank's tokens in memory.

    Attributes:
        name: Name of the layout.
        length: Tokens of the unsharded sequence.
        shards: The segments of each rank.

    Raises:
        LayoutError: Unless each position from 0 to length - 1 is on exactly one rank, and each rank has at least one.
    """

    name: str
    length: int
    shards: tuple[tuple[Segment, ...], ...]
    _hash: int = field(init=False, repr=False, compare=False)
    _counts: tuple[int, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not isinstance(self.name, str):
            raise LayoutError("the name of a layout must be a string", got=shown(self.name))
        object.__setattr__(self, "length", as_int(self.length))
        object.__setattr__(self, "shards", _listed(self.shards))
        _check_partition(self)
        object.__setattr__(self, "_hash", hash((self.length, self.shards)))
        object.__setattr__(self, "_counts", tuple(sum([s.count for s in shard]) for shard in self.shards))

    def __hash__(self) -> int:
        return self._hash

    def __repr__(self) -> str:
        return f"Layout({self.name!r}, length={self.length}, ranks={self.ranks})"

    @property
    def ranks(self) -> int:
        """Number of ranks that share the sequence."""
        return len(self.shards)

    def count(self, rank: int) -> int:
        """Return the number of tokens of a rank."""
        return self._counts[rank]

    def positions(self, rank: int) -> list[int]:
        """Return a rank's global positions, in the order of its tokens."""
        return [p for s in self.shards[rank] for p in s.positions()]

    def describe(self) -> str:
        """Return the name; for a layout without a name, the segments of its first rank."""
        first = self.shards[0]
        return self.name or f"{len(first)} segment{'s' if len(first) > 1 else ''} per rank, step {first[0].step}"

    def joined(self, each: int | None = None, spacing: int = 1) -> Layout:
        """Concatenate each `each` consecutive shards (default: all) into the shard of one rank.

        With `spacing` above 1, shards that are `spacing` ranks apart are concatenated instead.
        """
        each = each or self.ranks
        starts = (first for first in range(self.ranks) if first // spacing % each == 0)
        groups = (self.shards[first : first + each * spacing : spacing] for first in starts)
        return Layout(f"joined {self.name}", self.length, tuple(tuple(chain.from_iterable(group)) for group in groups))

    def sorted(self) -> Layout:
        """Return a layout with equal positions per rank, segments sorted by start, and adjacent ones merged."""
        shards = (sorted(shard, key=lambda s: s.start) for shard in self.shards)
        return Layout(f"sorted {self.name}", self.length, tuple(map(merged, shards)))


def cut(segments: Iterable[Segment], start: int, stop: int) -> tuple[Segment, ...]:
    """Return rows [start, stop) of a block with these segments, as segments."""
    found, before = [], 0
    for s in segments:
        first, past = max(start - before, 0), min(stop - before, s.count)
        if first < past:
            found.append(Segment(s.start + first * s.step, past - first, s.step))
        before += s.count
    return tuple(found)


def merged(segments: Iterable[Segment]) -> tuple[Segment, ...]:
    """Return the segments without empty ones. Neighbors are joined if one continues the other."""
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
    """Return the shards as tuples, without empty segments."""
    try:
        listed = [tuple(shard) for shard in shards]
    except TypeError:
        raise LayoutError("a layout needs a list of segments for every rank", got=shown(shards)) from None
    for s in chain.from_iterable(listed):
        if not isinstance(s, Segment):
            raise LayoutError("a layout needs segments", got=shown(s), allowed="Segment")
    return tuple(tuple(s for s in shard if s.count) for shard in listed)


def _check_ranks(name: str, ranks: int) -> None:
    if ranks > MOST_RANKS:
        raise LayoutError(f"the layout {name!r} has too many ranks", got=ranks, allowed=f"at most {MOST_RANKS}")


def _check_partition(layout: Layout) -> None:
    """Raise `LayoutError` unless each position is on one rank and each rank has one. Positions are never listed."""
    what = f"the layout {layout.name!r}"
    if not isinstance(layout.length, int) or layout.length < 1 or not layout.shards:
        raise LayoutError(f"{what} needs ranks and tokens", got=f"{layout.ranks} ranks, {layout.length} tokens")
    _check_ranks(layout.name, layout.ranks)
    if empty := [rank for rank, shard in enumerate(layout.shards) if not shard]:
        got = f"ranks {empty[:8]} of {layout.ranks}, {layout.length} tokens"
        next_step = "use fewer ranks, or another layout"
        raise LayoutError(f"{what} leaves ranks without a token", got=got, next_step=next_step)
    segments = list(chain.from_iterable(layout.shards))
    count, last = sum(s.count for s in segments), max(s.last for s in segments)
    if last >= layout.length:
        raise LayoutError(f"{what} exceeds its sequence", got=f"position {last}", allowed=f"0 to {layout.length - 1}")
    if pair := _shared(segments):
        got = f"{pair[0]} and {pair[1]}"
        raise LayoutError(f"{what} contains a position twice", got=got, allowed="every position once")
    if count != layout.length:
        raise LayoutError(f"{what} omits positions", got=f"{count} of {layout.length}", allowed="all")


def _shared(segments: Sequence[Segment]) -> tuple[Segment, Segment] | None:
    """Return two segments that share a position, or None."""
    tracks: dict[tuple[int, int], list[Segment]] = defaultdict(list)  # segments of one track are intervals
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
            if met := next(filter(s.meets, begun[step]), None):
                return met, s
        begun[s.step].append(s)
    return None


_BLOCK = 128  # rows per block of kernels: chunks of full blocks leave no block partly empty
_UNEVEN = 1.03  # ratio of the busiest rank's load to the mean, above which another document is split


def contiguous(length: int, ranks: int) -> Layout:
    """Give rank r the r-th of `ranks` chunks."""
    return Layout("contiguous", length, tuple(merged([_chunk(length, ranks, r)]) for r in range(ranks)))


def zigzag(length: int, ranks: int) -> Layout:
    """Give rank r chunks r and 2W-1-r of 2W (Zhu, ring-flash-attention; Llama 3, section 3.3.2)."""
    return Layout("zigzag", length, _zigzags([(0, length)], ranks))


def striped(length: int, ranks: int) -> Layout:
    """Give rank r every W-th position from r (Striped Attention, arXiv 2311.09431)."""
    return Layout("striped", length, tuple((Segment(r, len(range(r, length, ranks)), ranks),) for r in range(ranks)))


def document_zigzag(cu_seqlens: Sequence[int], ranks: int) -> Layout:
    """Split every document in a zigzag, so that packed causal work is balanced. One document gives `zigzag`."""
    return Layout("document_zigzag", cu_seqlens[-1], _zigzags(list(pairwise(cu_seqlens)), ranks))


def _zigzags(documents: Sequence[tuple[int, int]], ranks: int) -> tuple[tuple[Segment, ...], ...]:
    """Return the shards of documents [start, stop) that are each split in a zigzag."""
    last = 2 * ranks - 1
    return tuple(
        merged(_chunk(b - a, last + 1, piece, a) for a, b in documents for piece in (rank, last - rank))
        for rank in range(ranks)
    )


def whole_documents(cu_seqlens: Sequence[int], ranks: int) -> Layout:
    """Assign unsplit documents to ranks, so that little is sent, and split the longest in zigzags to balance the load.

    Documents are split until the busiest rank has at most 3 % more than the mean, of the pairs of a causal mask and of
    the tokens. That needs enough long documents. The chunks of a split document are full blocks of kernels, in short
    sequences at least a sixteenth of a rank's tokens. The imbalance may be larger for ranks of less than some 8,000
    tokens, because blocks are not split. Chunks come first on their rank, so that other ranks need one range.
    """
    longest = sorted(pairwise(cu_seqlens), key=lambda d: (d[0] - d[1], d))
    chunk = max(1, min(_BLOCK, cu_seqlens[-1] // (16 * ranks)))
    dealt = _evenest(longest, ranks, 2 * ranks * chunk)
    if dealt.idle:  # fewer long documents than ranks: smaller chunks are better than idle ranks
        dealt = _evenest(longest, ranks, 2 * ranks)
    return Layout("whole_documents", cu_seqlens[-1], dealt.shards)


def _evenest(documents: Sequence[tuple[int, int]], ranks: int, shortest: int) -> _Dealt:
    """Return the most balanced assignment found. Split documents have at least `shortest` tokens."""
    most = sum(stop - start >= shortest for start, stop in documents)
    cut, best = 0, _Dealt(documents, 0, ranks)
    while best.uneven > _UNEVEN and cut < most:
        cut = min(most, cut + 1 + cut // 8)
        best = min(best, _Dealt(documents, cut, ranks), key=lambda dealt: dealt.uneven)
    return best


class _Dealt:
    """Documents assigned to ranks: the first `cut` in zigzags, each other one to the least loaded rank."""

    def __init__(self, documents: Sequence[tuple[int, int]], cut: int, ranks: int) -> None:
        self._pairs, self._rows = [0] * ranks, [0] * ranks
        self._all = sum((b - a) ** 2 for a, b in documents), sum(b - a for a, b in documents)
        chunks: list[list[Segment]] = [[] for _ in range(ranks)]
        whole: list[list[Segment]] = [[] for _ in range(ranks)]
        rests: list[tuple[int, int, int]] = []  # past the last full block: (start of the document, first, stop)
        for index, (start, stop) in enumerate(documents[:cut]):
            block = min(_BLOCK, (stop - start) // (2 * ranks))
            blocks = (stop - start) // block
            for turn in range(ranks):
                rank = (turn + index) % ranks  # some chunks are a block longer: spread these over the ranks
                for piece in (turn, 2 * ranks - 1 - turn):
                    chunk = _chunk(blocks, 2 * ranks, piece)
                    first, past = (start + at * block for at in (chunk.start, chunk.start + chunk.count))
                    chunks[rank].append(self._give(rank, start, first, past))
            rests.append((start, start + blocks * block, stop))
        least = [(self._load(rank), rank) for rank in range(ranks)]
        heapify(least)
        for start, first, stop in (*rests, *((a, a, b) for a, b in documents[cut:])):
            if first < stop:
                rank = least[0][1]
                (whole if first == start else chunks)[rank].append(self._give(rank, start, first, stop))
                heapreplace(least, (self._load(rank), rank))
        self.shards = tuple(merged([*chunks[r], *sorted(whole[r], key=lambda s: s.start)]) for r in range(ranks))
        self.uneven = max(
            max(held) * ranks / every for held, every in zip((self._pairs, self._rows), self._all, strict=True)
        )
        self.idle = not all(self._rows)

    def _give(self, rank: int, start: int, first: int, past: int) -> Segment:
        """Give a rank the tokens [first, past) of a document that begins at `start`, and return them."""
        self._pairs[rank] += (past - start) ** 2 - (first - start) ** 2
        self._rows[rank] += past - first
        return Segment(first, past - first)

    def _load(self, rank: int) -> int:
        """Return the larger of a rank's shares of all pairs and of all tokens."""
        return max(self._pairs[rank] * self._all[1], self._rows[rank] * self._all[0])


_CHUNKS = (4, 8, 16, 32)
"""Chunks per rank that are tried. More of them balance better, but make more tiles and more rows to send."""
_EVEN = 1.01  # ratio of a rank's pairs to the mean, up to which it may be chosen for the rows that it holds
_SWAPPING = 8  # ranks with the fewest pairs, with which the busiest one may swap chunks
_LARGEST_SEARCH = 1 << 17  # chunks times ranks; above this, chunks are dealt by their pairs alone


def dispatched(mask: Mask, length: int, ranks: int) -> Layout:
    """Give chunks to ranks so that all have equally many tokens and about as many visible pairs.

    This is the dispatch of MagiAttention (github.com/SandAI-org/MagiAttention): the chunk with the most pairs goes to
    the rank with the fewest. Here, a rank with room that holds or needs the same keys already may be preferred. Then
    chunks are exchanged to relieve the busiest rank. This is tried with several numbers of chunks, which have at least
    the rows of a kernel's block, except in short sequences. In the chosen result, the busiest rank has at most 3 % more
    pairs than the mean, and the largest number of rows that a rank needs of others is smallest. If none is so even, the
    most even one is chosen.
    """
    counts = [each for each in _CHUNKS if ranks * each * _BLOCK <= length] or [max(1, min(8, length // ranks))]
    deals = []
    for each in counts:
        chunks = _Chunks(mask, length, ranks * each)
        for gathers in (False, True)[: 1 + (ranks * ranks * each <= _LARGEST_SEARCH)]:
            deals.append(_Deal(chunks, ranks, each, gathers=gathers))
    best = min(deals, key=lambda deal: (max(deal.uneven, _UNEVEN), deal.needed_rows))
    return Layout("dispatched", length, best.shards())


class _Chunks:
    """Equal chunks of a sequence, the visible pairs of each, and the chunks whose keys it needs as bits."""

    def __init__(self, mask: Mask, length: int, number: int) -> None:
        self.segments = [_chunk(length, number, index) for index in range(number)]
        self._starts, self._length = [s.start for s in self.segments], length
        found = [self._visible(mask, s.start, s.start + s.count) for s in self.segments]
        self.pairs, self.needs = [pairs for pairs, _ in found], [needs for _, needs in found]

    def _visible(self, mask: Mask, first: int, past: int) -> tuple[int, int]:
        """Return the visible pairs of the queries [first, past), and the chunks whose keys they need."""
        pairs = needs = 0
        for region in mask.regions_of_rows(first, past):
            start, stop, k_stop = max(first, region.q_start), min(past, region.q_stop), min(region.k_stop, self._length)
            k_first, k_past = max(region.k_start, start - region.hi), min(k_stop, stop - region.lo)
            if start < stop and k_first < k_past:
                offset = start - region.k_start
                pairs += band_area(stop - start, k_stop - region.k_start, region.lo - offset, region.hi - offset)
                needs |= (1 << bisect_right(self._starts, k_past - 1)) - (1 << bisect_right(self._starts, k_first) - 1)
        return pairs, needs


class _Deal:
    """Chunks dealt to ranks. If `gathers`, a chunk goes to a rank that needs few further rows, if there is room."""

    def __init__(self, chunks: _Chunks, ranks: int, each: int, *, gathers: bool) -> None:
        self._chunks, self._ranks = chunks, ranks
        self._held: list[list[int]] = [[] for _ in range(ranks)]
        self._pairs = [0] * ranks
        self._mean = sum(chunks.pairs) / ranks
        self._deal(each, gathers)
        self._exchange()
        self.uneven = max(self._pairs) / self._mean if self._mean else 1.0
        self.needed_rows = max(self._needed_rows(held) for held in self._held)

    def shards(self) -> tuple[tuple[Segment, ...], ...]:
        """Return the segments of each rank, in the order of the sequence."""
        return tuple(merged(self._chunks.segments[chunk] for chunk in sorted(held)) for held in self._held)

    def _deal(self, each: int, gathers: bool) -> None:
        pairs, needs, ranks = self._chunks.pairs, self._chunks.needs, range(self._ranks)
        longer = sum(self._is_long(chunk) for chunk in range(len(pairs)))
        # By rank: how many more chunks of both lengths it gets. Numbers of tokens then differ by at most one.
        longs = [len(range(rank, longer, self._ranks)) for rank in ranks]
        room = [{True: long, False: each - long} for long in longs]
        brought = [0] * self._ranks  # chunks whose rows a rank holds or needs, as bits
        for chunk in sorted(range(len(pairs)), key=lambda chunk: (-pairs[chunk], chunk)):
            long, bits = self._is_long(chunk), needs[chunk] | 1 << chunk
            free = [rank for rank in ranks if room[rank][long]]
            even = [r for r in free if self._pairs[r] + pairs[chunk] <= _EVEN * self._mean] if gathers else []
            if even:
                rank = min(even, key=lambda r: ((bits & ~brought[r]).bit_count(), self._pairs[r], r))
            else:
                rank = min(free, key=lambda r: (self._pairs[r], r))
            self._held[rank].append(chunk)
            self._pairs[rank] += pairs[chunk]
            room[rank][long] -= 1
            brought[rank] |= bits

    def _is_long(self, chunk: int) -> bool:
        """Return whether a chunk has one token more than the shortest ones."""
        segments = self._chunks.segments
        return segments[chunk].count > segments[-1].count

    def _exchange(self) -> None:
        """Exchange chunks of the rank with the most pairs for smaller ones of others, while that lowers the maximum."""
        pairs = self._chunks.pairs
        for _ in pairs:
            *others, most = sorted(range(self._ranks), key=self._pairs.__getitem__)
            top = self._pairs[most]
            if top <= _EVEN * self._mean:
                return
            swaps = [
                (max(top - less, self._pairs[other] + less), other, given, taken)
                for other in others[:_SWAPPING]
                for given in self._held[most]
                for taken in self._held[other]
                if (less := pairs[given] - pairs[taken]) > 0 and self._is_long(given) == self._is_long(taken)
            ]
            if not swaps or min(swaps)[0] >= top:
                return
            _, other, given, taken = min(swaps)
            for rank, old, new in ((most, given, taken), (other, taken, given)):
                self._held[rank].remove(old)
                self._held[rank].append(new)
                self._pairs[rank] += pairs[new] - pairs[old]

    def _needed_rows(self, held: list[int]) -> int:
        """Return the rows of other ranks that a rank with these chunks needs."""
        needs = owned = 0
        for chunk in held:
            needs |= self._chunks.needs[chunk]
            owned |= 1 << chunk
        return (needs & ~owned).bit_count() * self._chunks.segments[-1].count


LAYOUTS = {"contiguous": contiguous, "zigzag": zigzag, "striped": striped}
OF_DOCUMENTS = {"document_zigzag": document_zigzag, "whole_documents": whole_documents}
MASKS_OF_DOCUMENTS = "masks of documents (full, causal and window are one document)"
"""What `OF_DOCUMENTS` take, for help and errors."""
OF_MASKS = (*OF_DOCUMENTS, "dispatched")
"""Layouts that depend on the mask."""
NAMES = (*LAYOUTS, *OF_MASKS)


def make_layout(name: str, length: int, ranks: int, mask: Mask | None = None) -> Layout:
    """Return the layout of a name. `OF_MASKS` depend on the mask, `OF_DOCUMENTS` on its documents.

    Args:
        name: One of `NAMES`.
        length: Tokens of the unsharded sequence.
        ranks: Number of ranks.
        mask: Mask, for the layouts that depend on it.

    Raises:
        UnknownNameError: If the name is not in `NAMES`.
        InputError: If `length` or `ranks` is not a positive integer.
        LayoutError: If they do not match, or the layout needs a mask, or documents that the mask does not have.
    """
    # Checked outside of the cache, in which 1, 1.0 and True are equal keys.
    length, ranks = size("length", length), size("ranks", ranks)
    if not isinstance(name, str) or name not in NAMES:
        raise unknown_name("layout", name, NAMES)
    if not isinstance(mask, Mask | None):
        raise LayoutError("mask must be a Mask", got=shown(mask))
    return _make(name, length, ranks, mask)


def suited(mask: Mask, length: int, ranks: int) -> Iterator[Layout]:
    """Yield layouts that may be the fastest for a mask. Among equally fast ones, the first is selected."""
    yield make_layout("zigzag", length, ranks)
    if ranks > 1:
        yield make_layout("contiguous", length, ranks)
    if ranks > 1 and len(mask.regions) > 1:
        for name in OF_MASKS:
            try:
                yield make_layout(name, length, ranks, mask)
            except LayoutError:  # these regions are not documents, or too few
                continue


@lru_cache(maxsize=256)
def _make(name: str, length: int, ranks: int, mask: Mask | None) -> Layout:
    _check_ranks(name, ranks)
    if length < ranks:
        got = f"{ranks} ranks for {length} tokens"
        next_step = f"use fewer ranks, or pad the sequence to at least {ranks} tokens (pad_to_multiple_of)"
        raise LayoutError("more ranks than tokens", got=got, allowed=f"at most {length} ranks", next_step=next_step)
    if name in OF_DOCUMENTS:
        return OF_DOCUMENTS[name](_document_cu_seqlens(name, mask, length), ranks)
    if name == "dispatched":
        if mask is None:
            next_step = "pass mask=, as to attention, or use the layout 'zigzag'"
            raise LayoutError(f"the layout {name!r} needs the mask", got="none", next_step=next_step)
        return dispatched(mask, length, ranks)
    return LAYOUTS[name](length, ranks)


def _document_cu_seqlens(name: str, mask: Mask | None, length: int) -> tuple[int, ...]:
    """Return the cumulative lengths of documents: the squares on the diagonal that tile the sequence.

    A mask with one region of all tokens, such as full, causal or a window, is one document.
    """
    cu_seqlens = [0]
    for region in mask.regions if mask is not None else ():
        if (region.q_start, region.q_stop) != (region.k_start, region.k_stop) or region.q_start != cu_seqlens[-1]:
            break
        cu_seqlens.append(min(region.q_stop, length))
    if cu_seqlens[-1] != length:
        what = f"the layout {name!r} needs a mask of documents that fill the sequence"
        got = "no mask" if mask is None else f"the mask {str(mask)!r} and {length} tokens"
        next_step = "pass Mask.documents(...), or use the layout 'zigzag'"
        raise LayoutError(what, got=got, allowed=MASKS_OF_DOCUMENTS, next_step=next_step)
    return tuple(cu_seqlens)


def _chunk(length: int, pieces: int, index: int, start: int = 0) -> Segment:
    """Return chunk `index` of `length` positions. The first `length mod pieces` are one longer: no rank is empty."""
    size, longer = divmod(length, pieces)
    return Segment(start + index * size + min(index, longer), size + (index < longer))
