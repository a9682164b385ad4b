"""Divide the queries or the keys into outer blocks, and find the inner blocks that each of them visits in the tiles.

In the forward, outer blocks contain queries and inner blocks contain keys. In the backward, outer blocks contain keys
and inner blocks contain queries. An inner block is full if all its pairs are visible. Full blocks are stored as runs of
consecutive blocks. An inner block that a band or a border cuts is masked. It has an entry with its bounds:
`block_tables` describes it. So the size of all blocks is proportional to the borders of the mask, not to its area.

Blocks may start at any index. Inner blocks of the backward start at multiples of 4.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from burst_portable.planning.tiles import Tile, Tiles

SHORT = 64  # inner blocks; an outer block that visits at most this many need not be divided
LONG_DOCUMENT = 4  # outer blocks; a block starts at the start of each document that is at least this long
_PART = 8  # inner blocks; adding the gradients of a shorter part takes more time than the division saves

Span = tuple[int, int]
"""[start, stop) of outer indices. It is shorter than the block size if the next block starts at a document's start."""


@dataclass(slots=True)
class OuterBlock:
    """Inner blocks that one outer block visits.

    Attributes:
        runs: (first inner index, number of blocks) of each run of full blocks.
        masked: Entries of the masked blocks.
        banded: Whether a band cuts one of its tiles. Adjacent outer blocks then visit more or fewer inner blocks.
        late: Number of masked blocks that the backward visits after the full blocks, the last ones in `masked`.
        falls: Whether the backward visits inner blocks by decreasing index. A run still has its lowest index.
    """

    runs: list[tuple[int, int]] = field(default_factory=list)
    masked: list[tuple[int, ...]] = field(default_factory=list)
    banded: bool = False
    late: int = 0
    falls: bool = False

    @property
    def full(self) -> int:
        return sum(count for _, count in self.runs)

    @property
    def length(self) -> int:
        return self.full + len(self.masked)

    @property
    def early(self) -> int:
        """Number of masked blocks that the backward visits before the full blocks."""
        return len(self.masked) - self.late

    def sort(self, *, falls: bool = False) -> None:
        """Visit the inner blocks of the backward by increasing index, or by decreasing index if `falls`.

        If masked blocks lie between full ones, they are visited first, in this order, and then the full ones.
        """
        self.falls = falls
        self.runs.sort(reverse=falls)
        self.masked.sort(reverse=falls)
        self.late = 0
        if self.runs:
            low, high = min(self.runs)[0], max(self.runs)[0]
            if all(not low < entry[0] < high for entry in self.masked):
                self.late = sum(entry[0] < low if falls else entry[0] > low for entry in self.masked)

    def walked(self) -> list[tuple[int, int]]:
        """Return (first inner index, number of blocks) of the runs of the backward, in the order of its visits."""
        single = [(entry[0], 1) for entry in self.masked]
        return [*single[: self.early], *self.runs, *single[self.early :]]


def collect_key_blocks(
    tiles: Tiles,
    rows: int,
    q_block: int,
    k_block: int,
    every_block_of: int,
    excluded: Span | None,
    align: int = 4,
    starts: Sequence[int] = (0,),
) -> tuple[dict[Span, OuterBlock], Span | None]:
    """Return the outer blocks of keys by span, and `LaunchTable.long`.

    The arguments are as in `block_tables.backward_table`.
    """
    turned = Tiles([Tile(t.k_start, t.k_stop, t.q_start, t.q_stop, -t.hi, -t.lo) for t in tiles])
    keys = max((t.q_stop for t in turned), default=0)
    spans = find_spans(turned, every_block_of or keys, k_block, excluded or ())
    if excluded is not None:
        spans = [span for span in spans if not excluded[0] <= span[0] < excluded[1]]
    collected = collect_blocks(turned, spans, k_block, q_block, rows, align, starts)
    usual = length_limit(collected)
    long = [span for span, block in collected.items() if block.length > usual]
    if every_block_of:
        collected |= {span: OuterBlock() for span in spans if span not in collected}
    return collected, (min(long)[0], max(long)[1]) if long else None


def find_spans(tiles: Iterable[Tile], length: int, size: int, cuts: Iterable[int] = ()) -> list[Span]:
    """Return the spans of the outer blocks. A block starts at 0, at `cuts` and at the start of each long document.

    If blocks start with their document, the diagonal lies in one inner block per outer block. A block that ends early
    takes as much time as a full one, so blocks do not start at short documents.

    Example with 16 keys per block and a document of 40 rows from row 8 on. On the right, a block starts at row 8::

        0   #...........         0    #...........     rows 0 to 7
        8   .#..........         8    .#..........
        16  .##.........         24   .##.........
        32  .###........         40   .###........
    """
    bounds = sorted({t.q_start for t in tiles if 0 < t.q_start < length} | {length})
    long = {bound for bound, following in pairwise(bounds) if following - bound >= LONG_DOCUMENT * size}
    starts = sorted({0} | long | {cut for cut in cuts if 0 < cut < length})
    ranges = pairwise([*starts, length])
    return [(at, min(at + size, stop)) for start, stop in ranges for at in range(start, stop, size)]


def length_limit(blocks: dict[Span, OuterBlock]) -> int:
    """Return the number of inner blocks above which an outer block is divided: twice the mean, at least `SHORT`.

    The long blocks of each head start first, but those of the last head end last.
    """
    total = sum(block.length for block in blocks.values())
    return max(SHORT, 2 * -(-total // max(1, len(blocks))))


def part_length_of(blocks: dict[Span, OuterBlock], fill: tuple[int, int]) -> int:
    """Return `part_length` of the blocks; `fill` is as in `block_tables.backward_table`."""
    return part_length([block.length for block in blocks.values()], *fill)


def part_length(lengths: list[int], heads: int, processors: int) -> int:
    """Return the maximum number of inner blocks per part for which the last part of all heads ends earliest."""

    def ends(most: int) -> int:
        parts = heads * sum(-(-length // most) for length in lengths)
        return -(-parts // processors) * (most + 1)  # start and end of a part take about as long as a block

    longest = max(lengths, default=_PART)
    return min((max(_PART, -(-longest // parts)) for parts in range(1, processors + 1)), key=ends)


def divide(block: OuterBlock, most: int, inner: int) -> Iterator[OuterBlock]:
    """Yield parts of one block. They have about equal lengths, at most `most` inner blocks each."""
    each = -(-block.length // -(-block.length // most))
    left = OuterBlock(list(block.runs), list(block.masked))
    while left.length:
        part = OuterBlock(masked=left.masked[:each])
        left.masked = left.masked[each:]
        while left.runs and part.length < each:
            start, count = left.runs.pop(0)
            taken = min(count, each - part.length)
            part.runs.append((start, taken))
            if taken < count:
                left.runs.insert(0, (start + taken * inner, count - taken))
        yield part


def collect_blocks(
    tiles: Iterable[Tile],
    spans: list[Span],
    outer: int,
    inner: int,
    queries: int | None = None,
    align: int = 1,
    origins: Sequence[int] = (0,),
) -> dict[Span, OuterBlock]:
    """Return the outer blocks that visit at least one inner block, by span. See `_visit`."""
    blocks: dict[Span, OuterBlock] = {}
    starts = [start for start, _ in spans]
    for tile in tiles:
        origin = origins[bisect_right(origins, tile.k_start) - 1]
        for at in range(bisect_right(starts, tile.q_start) - 1, bisect_left(starts, tile.q_stop)):
            _visit(blocks.setdefault(spans[at], OuterBlock()), spans[at], tile, outer, inner, queries, align, origin)
    return {span: block for span, block in blocks.items() if block.length}


def _visit(
    block: OuterBlock, span: Span, tile: Tile, outer: int, inner: int, queries: int | None, align: int, origin: int
) -> None:
    """Add the inner blocks that an outer block visits in one tile, from the first visible inner index on.

    Outer blocks have `outer` rows, inner blocks `inner`. In the forward, `queries` is None, and outer indices after the
    block's stop count as visible, because they are never stored. In the backward, it is the number of inner rows.
    Padding after them counts as visible, because its row terms are -inf and P is 0. Inner blocks start at multiples of
    `align` from `origin` on. In the backward these are multiples of 4, since TMA reads float32 row terms only from
    multiples of 16 bytes.
    """
    block.banded |= not tile.full
    top, bottom = span
    first, last = max(top, tile.q_start), min(bottom, tile.q_stop) - 1
    start, stop = max(tile.k_start, first - tile.hi), min(tile.k_stop, last - tile.lo + 1)
    start -= (start - origin) % align
    count = -(-(stop - start) // inner)
    whole_outer = first == top and last + 1 == bottom and (queries is None or bottom - top == outer)
    full_from, full_to = count, count
    if whole_outer:
        # inner indices that are visible from every outer index of the block
        seen_start, seen_stop = max(tile.k_start, last - tile.hi), min(tile.k_stop, first - tile.lo + 1)
        if seen_stop == queries:
            seen_stop = start + count * inner
        full_from = min(count, max(0, -(-(seen_start - start) // inner)))
        full_to = max(full_from, min(count, (seen_stop - start) // inner))
    if full_to > full_from:
        block.runs.append((start + full_from * inner, full_to - full_from))
    for i in (*range(full_from), *range(full_to, count)):
        at = start + i * inner
        block.masked.append((at, tile.k_start, tile.k_stop, first, last + 1, tile.lo, tile.hi, 0))
