"""Build the launch tables of the Hopper kernels from tiles.

`forward_table` is for the forward. In the backward, additions to dQ have any order (`backward_table`) or the order of
the table (`ordered_table`, and `divided_table` for few keys that very many queries see).

A launch table lists the inner blocks that each outer block visits. In the forward, outer blocks contain queries and
inner blocks contain keys. In the backward, outer blocks contain keys and inner blocks contain queries.

An inner block is full if all its pairs are visible. Full blocks are stored as runs of consecutive blocks. An inner
block that a band or a border cuts is masked. It has an entry with its bounds. So the size of a table is proportional to
the borders of the mask, not to its area. A table is one flat list of int32::

    work    16 per outer block     outer start, offset of its runs, number of runs, number of full blocks,
                                   offset of its masked entries, number of masked entries, outer stop,
                                   offset of the turns of its runs, the 8 values of one masked entry
                                   (forward) or the number of masked blocks that are visited first and the
                                   first row of the gradients that are written (backward)
    runs    2 per run              first inner index, number of blocks
    turns   4 per run              number of the first inner block, turn of this visit, turn of the next visit of these
                                   blocks, and 1 if this visit may write them (ordered tables only)
    masked  8 per masked entry     first inner index, inner start, inner stop, outer start, outer stop, lo, hi,
                                   1 if all pairs are visible

Offsets count int32 values from the start of the list. A pair of a masked block is visible if inner is in
[inner start, inner stop), outer is in [outer start, outer stop), and lo <= outer - inner <= hi.

The forward computes one masked block before its loop. Its entry is part of the work row, so a program reads only
this row to start. Then come the full blocks, then the other masked blocks. The backward visits the masked blocks first,
then the full blocks. An ordered table may have some masked blocks after the full blocks. In the backward, two values
replace the entry in the work row: the number of masked blocks before the full blocks, and the first row of the written
gradients. The runs contain all visited blocks in this order, masked ones too, except the entry in the work
row.

Blocks may start at any index. Inner blocks of the backward start at multiples of 4.

In an ordered table, the work rows that visit an inner block add to it in the order of the table. So inner blocks start
at multiples of their size. They are counted from the first query or from the start of a long document
(`query_starts`). A run ends where the next visitor changes. The first visit of a block writes it. But blocks at the
border of two documents may have rows of both. A visit adds 0 to those of the other one, in no order. So these blocks
are cleared before the launch. `_order` says which order lets programs wait least. If outer blocks are divided, each
part writes separate gradients, in the order of the work rows. The outer stop is then the end of these rows.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, groupby, pairwise

from burst_portable.planning.tiles import Tile, Tiles

_WORK = 16  # int32 values per work row
_HIDDEN = (0, 0, 0, 0, 0, 0, 0, 0)  # entry of a masked block without visible pairs
SHORT = 64  # inner blocks; an outer block that visits at most this many need not be divided
_LONG = 4  # outer blocks; a block starts at the start of each document that is at least this long
_OUTLIER = 4  # times the median length of a group of an ordered table, which is not reversed for a longer block
NONE = -1  # turn after the last visit of an inner block
_LATER = -2  # turn after the last visit of a launch, if a later launch visits the inner block again
_PART = 8  # inner blocks; adding the gradients of a shorter part takes more time than the division saves

# Query blocks of one head that run at the same time. Each starts 1 MiB of K and V after the previous one.
ABREAST = 32

Span = tuple[int, int]
"""[start, stop) of outer indices. It is shorter than the block size if the next block starts at a document's start."""


@dataclass(frozen=True, slots=True)
class LaunchTable:
    """One launch table in host memory.

    Attributes:
        numbers: The int32 values of the table.
        blocks: Work rows, which is the number of outer blocks (or parts of them) that are launched per head.
        long: Outer indices from the first to the last block that visits more inner blocks than `_longest_of`; None
            if there is none. Dividing these blocks is faster.
        lengths: Number of inner blocks of each work row.
        turns: Of an ordered table, the turn of the first visit of each inner block, or `NONE`. Empty for other tables.
            A turn is the number of the work row, plus the number of all work rows for each visit of this row before.
        cleared: Of an ordered table, [start, stop) of the inner indices that must be 0 before the launch.
        waits: Whether a program of an ordered table begins with inner blocks that another one visits at the same time.
            It waits less if programs of all heads run at the same time.
        parts: Of an ordered table with divided outer blocks, each of them and its number of work rows. Empty for other
            tables.
    """

    numbers: list[int]
    blocks: int
    long: Span | None = None
    lengths: tuple[int, ...] = ()
    turns: tuple[int, ...] = ()
    cleared: tuple[Span, ...] = ()
    waits: bool = False
    parts: tuple[tuple[Span, int], ...] = ()

    @property
    def longest(self) -> int:
        """Maximum number of inner blocks per work row."""
        return max(self.lengths, default=0)

    @property
    def total(self) -> int:
        """Sum of the inner blocks of all work rows."""
        return sum(self.lengths)


@dataclass(slots=True)
class _Block:
    """Inner blocks that one outer block visits.

    Attributes:
        runs: (first inner index, number of blocks) of each run of full blocks.
        masked: Entries of the masked blocks.
        banded: Whether a band cuts one of its tiles. Adjacent outer blocks then visit more or fewer inner blocks.
        late: Number of masked blocks that the backward visits after the full blocks, the last ones in `masked`.
    """

    runs: list[tuple[int, int]] = field(default_factory=list)
    masked: list[tuple[int, ...]] = field(default_factory=list)
    banded: bool = False
    late: int = 0

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

    def sort(self) -> None:
        """Visit the inner blocks of the backward by increasing index, unless masked blocks lie between full ones."""
        self.runs.sort()
        self.masked.sort()
        if self.runs and all(not self.runs[0][0] < entry[0] < self.runs[-1][0] for entry in self.masked):
            self.late = sum(entry[0] > self.runs[0][0] for entry in self.masked)

    def walked(self) -> list[tuple[int, int]]:
        """Return (first inner index, number of blocks) of the runs of the backward, in the order of its visits."""
        single = [(entry[0], 1) for entry in self.masked]
        return [*single[: self.early], *self.runs, *single[self.early :]]


def forward_table(
    tiles: Tiles, rows: int, q_block: int, k_block: int, every_block: bool, mebibyte: int = 1 << 30
) -> LaunchTable:
    """Return the table of the forward: outer blocks of queries, inner blocks of keys.

    Each outer block has at least one masked block, which the kernel computes before its loop.

    Args:
        tiles: Visible pairs.
        rows: Number of queries.
        q_block: Queries per outer block.
        k_block: Keys per inner block.
        every_block: Include blocks without visible keys, because they must write 0 and -inf.
        mebibyte: Number of inner blocks whose K and V take 1 MiB.
    """
    spans = _spans(tiles, rows, q_block)
    blocks = _collect(tiles, spans, q_block, k_block)
    if every_block:
        for span in spans:
            blocks.setdefault(span, _Block(masked=[_HIDDEN]))
    for number, (span, block) in enumerate(blocks.items()):
        if not block.masked:  # convert the first full block to a masked one whose mask shows all pairs
            (start, count), *rest = block.runs
            block.runs = [(start + k_block, count - 1), *rest] if count > 1 else rest
            block.masked.append((start, start, start + k_block, *span, -(1 << 30), 1 << 30, 1))
        if not block.banded and block.length >= 2 * ABREAST * mebibyte:
            # Programs that visit boxes of equal length advance at the same speed. If the L2 does not hold the box, all
            # of them would wait for the same block from memory. So each starts 1 MiB after the previous one. Programs
            # of a causal square have different lengths and need no offset.
            skip = number % ABREAST * mebibyte
            block.runs = [part for run in block.runs for part in _rotated(run, skip, k_block)]
    return _pack(blocks.items(), peel=True)


def backward_table(
    tiles: Tiles,
    rows: int,
    q_block: int,
    k_block: int,
    every_block_of: int = 0,
    *,
    excluded: Span | None = None,
    fill: tuple[int, int] | None = None,
) -> LaunchTable:
    """Return the table of the backward: outer blocks of keys, inner blocks of queries.

    A long outer block is divided into parts with one work row each. All parts add to the same gradients.

    Args:
        tiles: Visible pairs.
        rows: Number of queries.
        q_block: Queries per inner block.
        k_block: Keys per outer block.
        every_block_of: Number of keys if blocks write their gradients instead of adding to them, else 0. Then no block
            is divided. Blocks without visible queries are included, because they must write 0.
        excluded: [start, stop) of the keys that another launch computes, as whole blocks. No tile may contain them.
        fill: (heads, multiprocessors). Blocks are divided so that the parts of all heads end at about the same time.
            Default: into parts of at most `_longest_of` inner blocks.
    """
    collected, long = _collect_backward(tiles, rows, q_block, k_block, every_block_of, excluded)
    most = _part_length_of(collected, fill) if fill else _longest_of(collected)
    blocks = []
    for span, block in collected.items():
        # Each run starts at the block's own index. Otherwise, programs that run at the same time would add to the same
        # rows of dq at the same time.
        block.runs = [part for run in block.runs for part in _rotated(run, (span[0] - run[0]) // q_block, q_block)]
        parts = [block] if every_block_of else _divided(block, most, q_block)
        blocks += [(span, part) for part in parts]
    return _pack(blocks, peel=False, long=long)


def ordered_table(
    tiles: Tiles,
    rows: int,
    q_block: int,
    k_block: int,
    every_block_of: int = 0,
    *,
    short: int,
    starts: Sequence[int] = (0,),
    excluded: Span | None = None,
    later: Sequence[int] = (),
) -> LaunchTable:
    """Return a table of the backward whose additions to each inner block have the order of the table.

    So the sum is the same in each launch. No outer block is divided.

    Args:
        tiles: Visible pairs.
        rows: Number of queries.
        q_block: Queries per inner block.
        k_block: Keys per outer block.
        every_block_of: See `backward_table`.
        short: Number of inner blocks up to which an outer block is short. See `_order`.
        starts: See `query_starts`.
        excluded: See `backward_table`.
        later: `LaunchTable.turns` of a launch after this one. Default: there is none.
    """
    collected, long = _collect_backward(tiles, rows, q_block, k_block, every_block_of, excluded, q_block, starts)
    order, waits = _order(collected, q_block, short)
    return replace(_pack_ordered(order, rows, q_block, starts, later=later), waits=waits, long=long)


def divided_table(
    tiles: Tiles,
    rows: int,
    q_block: int,
    k_block: int,
    *,
    fill: tuple[int, int],
    starts: Sequence[int] = (0,),
    earlier: Sequence[int] = (),
) -> LaunchTable:
    """Return an ordered table whose outer blocks are divided. Each part writes separate gradients.

    Parts of one outer block visit other inner blocks, so they do not wait for each other.

    Args:
        tiles: Visible pairs.
        rows: Number of queries.
        q_block: Queries per inner block.
        k_block: Keys per outer block.
        fill: See `backward_table`.
        starts: See `query_starts`.
        earlier: `LaunchTable.turns` of a launch before this one. Default: there is none.
    """
    collected, _ = _collect_backward(tiles, rows, q_block, k_block, 0, None, q_block, starts)
    most = _part_length_of(collected, fill)
    order, parts = [], []
    for span, block in sorted(collected.items(), key=lambda item: item[0]):
        block.sort()
        made = list(_divided(block, most, q_block))
        order += [(span, part) for part in made]
        parts.append((span, len(made)))
    written = [(k_block * i, k_block * (i + 1)) for i in range(len(order))]
    table = _pack_ordered(order, rows, q_block, starts, written, earlier=earlier)
    return replace(table, waits=len(parts) > 1, parts=tuple(parts))


def query_starts(tiles: Tiles, rows: int, q_block: int) -> tuple[int, ...]:
    """Return 0 and the first query of each long document, rounded down to a multiple of 4.

    Blocks of an ordered table start there. Blocks that have rows of two documents would be visited more often.
    """
    candidates, reached = [0], 0
    for start, stop in sorted((t.q_start, t.q_stop) for t in tiles):
        if reached <= start and candidates[-1] < start < rows:
            candidates.append(start)
        reached = max(reached, stop)
    following = (*candidates[1:], rows)
    long = [at for at, end in zip(candidates, following, strict=True) if at >= 4 and end - at >= _LONG * q_block]
    return (0, *(at - at % 4 for at in long))


def _collect_backward(
    tiles: Tiles,
    rows: int,
    q_block: int,
    k_block: int,
    every_block_of: int,
    excluded: Span | None,
    align: int = 4,
    starts: Sequence[int] = (0,),
) -> tuple[dict[Span, _Block], Span | None]:
    """Return the outer blocks of keys by span, and `LaunchTable.long`. The arguments are as in `backward_table`."""
    turned = Tiles([Tile(t.k_start, t.k_stop, t.q_start, t.q_stop, -t.hi, -t.lo) for t in tiles])
    keys = max((t.q_stop for t in turned), default=0)
    spans = _spans(turned, every_block_of or keys, k_block, excluded or ())
    if excluded is not None:
        spans = [span for span in spans if not excluded[0] <= span[0] < excluded[1]]
    collected = _collect(turned, spans, k_block, q_block, rows, align, starts)
    usual = _longest_of(collected)
    long = [span for span, block in collected.items() if block.length > usual]
    if every_block_of:
        collected |= {span: _Block() for span in spans if span not in collected}
    return collected, (min(long)[0], max(long)[1]) if long else None


def _spans(tiles: Iterable[Tile], length: int, size: int, cuts: Iterable[int] = ()) -> list[Span]:
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
    long = {bound for bound, following in pairwise(bounds) if following - bound >= _LONG * size}
    starts = sorted({0} | long | {cut for cut in cuts if 0 < cut < length})
    ranges = pairwise([*starts, length])
    return [(at, min(at + size, stop)) for start, stop in ranges for at in range(start, stop, size)]


def _longest_of(blocks: dict[Span, _Block]) -> int:
    """Return the number of inner blocks above which an outer block is divided: twice the mean, at least `SHORT`.

    The long blocks of each head start first, but those of the last head end last.
    """
    total = sum(block.length for block in blocks.values())
    return max(SHORT, 2 * -(-total // max(1, len(blocks))))


def _part_length_of(blocks: dict[Span, _Block], fill: tuple[int, int]) -> int:
    """Return `part_length` of the blocks; `fill` is as in `backward_table`."""
    return part_length([block.length for block in blocks.values()], *fill)


def part_length(lengths: list[int], heads: int, processors: int) -> int:
    """Return the maximum number of inner blocks per part for which the last part of all heads ends earliest."""

    def ends(most: int) -> int:
        parts = heads * sum(-(-length // most) for length in lengths)
        return -(-parts // processors) * (most + 1)  # start and end of a part take about as long as a block

    longest = max(lengths, default=_PART)
    return min((max(_PART, -(-longest // parts)) for parts in range(1, processors + 1)), key=ends)


def _divided(block: _Block, most: int, inner: int) -> Iterator[_Block]:
    """Yield parts of one block. They have about equal lengths, at most `most` inner blocks each."""
    each = -(-block.length // -(-block.length // most))
    left = _Block(list(block.runs), list(block.masked))
    while left.length:
        part = _Block(masked=left.masked[:each])
        left.masked = left.masked[each:]
        while left.runs and part.length < each:
            start, count = left.runs.pop(0)
            taken = min(count, each - part.length)
            part.runs.append((start, taken))
            if taken < count:
                left.runs.insert(0, (start + taken * inner, count - taken))
        yield part


def _collect(
    tiles: Iterable[Tile],
    spans: list[Span],
    outer: int,
    inner: int,
    queries: int | None = None,
    align: int = 1,
    origins: Sequence[int] = (0,),
) -> dict[Span, _Block]:
    """Return the outer blocks that visit at least one inner block, by span. See `_visit`."""
    blocks: dict[Span, _Block] = {}
    starts = [start for start, _ in spans]
    for tile in tiles:
        origin = origins[bisect_right(origins, tile.k_start) - 1]
        for at in range(bisect_right(starts, tile.q_start) - 1, bisect_left(starts, tile.q_stop)):
            _visit(blocks.setdefault(spans[at], _Block()), spans[at], tile, outer, inner, queries, align, origin)
    return {span: block for span, block in blocks.items() if block.length}


def _visit(
    block: _Block, span: Span, tile: Tile, outer: int, inner: int, queries: int | None, align: int, origin: int
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


def _rotated(run: tuple[int, int], skip: int, inner: int) -> Iterator[tuple[int, int]]:
    """Yield a run in two parts: from block number `skip` to the end, then the beginning. Else the whole run."""
    start, count = run
    if 0 < skip < count:
        yield start + skip * inner, count - skip
        yield start, skip
    else:
        yield run


@dataclass(frozen=True, slots=True)
class _Visit:
    """A run of inner blocks of one work row: its first inner index, and the numbers of its inner blocks."""

    start: int
    blocks: range


def _pack_ordered(
    order: Sequence[tuple[Span, _Block]],
    rows: int,
    inner: int,
    starts: Sequence[int],
    written: Sequence[Span] | None = None,
    *,
    earlier: Sequence[int] = (),
    later: Sequence[int] = (),
) -> LaunchTable:
    """Return the table of a backward whose additions are ordered.

    Args:
        order: The outer blocks in the order of their additions.
        rows: Number of queries.
        inner: Queries per inner block.
        starts: See `query_starts`. Inner blocks are numbered from the first to the last document.
        written: The rows of the gradients that each work row writes. Default: those of the outer block.
        earlier: `LaunchTable.turns` of a launch before this one.
        later: `LaunchTable.turns` of a launch after this one.
    """
    stops = (*starts[1:], rows)
    numbers = [0, *accumulate(-(-(stop - start) // inner) for start, stop in zip(starts, stops, strict=True))]
    inner_blocks = numbers[-1]
    shared = {number + side for number in numbers[1:-1] for side in (-1, 0)}  # blocks at a border of documents
    # 1 for an inner block that no visit has written or added to
    fresh = bytearray(turn == NONE for turn in earlier) or bytearray(b"\1" * inner_blocks)
    for number in shared:
        fresh[number] = 0
    walks: list[list[tuple[int, range, int, int]]] = []  # first inner index, inner blocks, turn, 1 if it may write them
    for number, (_, block) in enumerate(order):
        walks.append([])
        for visit, repeat in _repeats(_joined(block.walked(), inner, starts, numbers), inner):
            for part, begins in _equal_parts(fresh, visit.blocks):
                at = visit.start + (part.start - visit.blocks.start) * inner
                walks[-1].append((at, part, number + repeat * len(order), begins))
            fresh[visit.blocks.start : visit.blocks.stop] = bytes(len(visit.blocks))
    following = [NONE if turn == NONE else _LATER for turn in later] or [NONE] * inner_blocks
    turns = [NONE] * inner_blocks
    visited: list[list[tuple[int, ...]]] = []
    for walk in reversed(walks):
        pieces: list[tuple[int, ...]] = []
        for start, blocks, turn, begins in reversed(walk):
            pieces[:0] = [
                (start + (part.start - blocks.start) * inner, len(part), part.start, turn, next_turn, begins)
                for part, next_turn in _equal_parts(following, blocks)
            ]
            same = [turn] * len(blocks)
            following[blocks.start : blocks.stop] = turns[blocks.start : blocks.stop] = same
        visited.append(pieces)
    table = _pack(order, peel=False, visited=visited[::-1], written=written)
    return replace(table, turns=tuple(turns), cleared=_cleared(turns, earlier, shared, inner, starts, stops, numbers))


def _cleared(
    turns: Sequence[int],
    earlier: Sequence[int],
    shared: Container[int],
    inner: int,
    starts: Sequence[int],
    stops: Sequence[int],
    numbers: Sequence[int],
) -> tuple[Span, ...]:
    """Return `LaunchTable.cleared`: the blocks that no visit of this launch or an earlier one writes."""
    if earlier:
        return ()
    spans = []
    for number, turn in enumerate(turns):
        if turn == NONE or number in shared:
            at = bisect_right(numbers, number) - 1
            start = starts[at] + (number - numbers[at]) * inner
            spans.append((start, min(start + inner, stops[at])))
    return tuple(spans)


def _joined(visits: list[tuple[int, int]], inner: int, starts: Sequence[int], numbers: Sequence[int]) -> list[_Visit]:
    """Return the runs with those joined that follow each other without a gap."""
    made: list[_Visit] = []
    for start, count in visits:
        at = bisect_right(starts, start) - 1
        first = numbers[at] + (start - starts[at]) // inner
        if made and start == made[-1].start + len(made[-1].blocks) * inner and first == made[-1].blocks.stop:
            made[-1] = _Visit(made[-1].start, range(made[-1].blocks.start, first + count))
        else:
            made.append(_Visit(start, range(first, first + count)))
    return made


def _repeats(visits: list[_Visit], inner: int) -> Iterator[tuple[_Visit, int]]:
    """Yield the runs of one work row, and how often the row has visited their blocks before.

    A row visits a block once for each tile of it.
    """
    ordered = sorted(visits, key=lambda visit: visit.blocks.start)
    if all(visit.blocks.stop <= following.blocks.start for visit, following in pairwise(ordered)):
        yield from ((visit, 0) for visit in visits)
        return
    seen: Counter[int] = Counter()
    for visit in visits:
        for i, number in enumerate(visit.blocks):
            yield _Visit(visit.start + i * inner, range(number, number + 1)), seen[number]
            seen[number] += 1


def _order(collected: dict[Span, _Block], inner: int, short: int) -> tuple[list[tuple[Span, _Block]], bool]:
    """Return the outer blocks of an ordered table in the order in which programs wait least, and `LaunchTable.waits`.

    All outer blocks visit inner blocks by increasing index. In groups that visit the same inner blocks, such as those
    of a document, outer blocks have decreasing indices. Under a causal mask or a window, each then begins with inner
    blocks that no other has visited, and follows the outer block before it at a distance. Groups with long outer blocks
    come first.

    A group has increasing indices if its longest outer block is longer than `short` or than most others, as that of
    attention sinks. Long outer blocks then come first, although each waits until the previous one has visited its first
    inner blocks. Programs of one head visit the same inner blocks at the same time. In the other order, the L2 would
    have to hold those of all heads: 16,384 causal tokens took twice as long on one H100.
    """
    groups: list[list[tuple[Span, _Block]]] = []
    ends: list[int] = []
    for span, block in sorted(collected.items(), key=lambda item: item[0]):
        block.sort()
        visits = block.walked()
        start, stop = (visits[0][0], visits[-1][0] + visits[-1][1] * inner) if visits else (0, 0)
        if not groups or start >= ends[-1] - inner:  # an inner block at the border of two documents is in both
            groups.append([])
            ends.append(0)
        groups[-1].append((span, block))
        ends[-1] = max(ends[-1], stop)
    made, waits = [], False
    for group in groups:
        lengths = sorted(block.length for _, block in group)
        upward = lengths[-1] > short or lengths[-1] > _OUTLIER * lengths[len(lengths) // 2]
        first, last = group[0][1], group[-1][1]
        waits |= len(group) > 1 and (upward or first.walked()[:1] == last.walked()[:1])
        made.append((lengths[-1], group if upward else group[::-1]))
    made.sort(key=lambda item: -item[0])
    return [item for _, group in made for item in group], waits


def _equal_parts(values: Sequence[int], where: range) -> Iterator[tuple[range, int]]:
    """Yield the longest parts of `where` for which `values` has one value, and this value."""
    at = where.start
    for value, equal in groupby(values[where.start : where.stop]):
        stop = at + len(list(equal))
        yield range(at, stop), value
        at = stop


def _pack(
    blocks: Iterable[tuple[Span, _Block]],
    *,
    peel: bool,
    long: Span | None = None,
    visited: list[list[tuple[int, ...]]] | None = None,
    written: Sequence[Span] | None = None,
) -> LaunchTable:
    """Return the table with its outer blocks in order of decreasing length, so that short ones are launched last.

    Outer blocks of an ordered table keep their order.

    Args:
        blocks: The outer blocks.
        peel: Whether the work row contains one masked entry (the forward).
        long: See `LaunchTable`.
        visited: For an ordered table, the runs of each outer block, which are in order: first inner index, number of
            blocks, and the four values of `turns`.
        written: For an ordered table, the rows of the gradients that each work row writes. Default: the outer block.
    """
    order = sorted(blocks, key=lambda item: -item[1].length) if visited is None else list(blocks)
    work: list[int] = []
    runs: list[int] = []
    turns: list[int] = []
    masked: list[int] = []
    walks: Sequence[Sequence[tuple[int, ...]]]
    walks = [_walked(block, peel=peel) for _, block in order] if visited is None else visited
    runs_at = _WORK * len(order)
    turns_at = runs_at + 2 * sum(map(len, walks))
    masked_at = turns_at + (0 if visited is None else 4 * sum(map(len, walks)))
    spans = [span for span, _ in order]
    for (start, _), (write_from, stop), (_, block), walk in zip(spans, written or spans, order, walks, strict=True):
        at, turn_at, masked_now = runs_at + len(runs), turns_at + len(turns), masked_at + len(masked)
        first, *rest = block.masked if peel else ((block.early, write_from, *_HIDDEN[2:]), *block.masked)
        work += (start, at, len(walk), block.full, masked_now, len(rest), stop, turn_at, *first)
        for run in walk:
            runs += run[:2]
            turns += run[2:]
        for entry in rest:
            masked += entry
    lengths = tuple(block.length for _, block in order)
    numbers = work + runs + turns + masked
    return LaunchTable(numbers, len(order), long, lengths)


def _walked(block: _Block, *, peel: bool) -> list[tuple[int, ...]]:
    """Return (first inner index, number of blocks) of the runs of an outer block, in the order of its visits."""
    return [*block.runs, *((entry[0], 1) for entry in block.masked[1:])] if peel else [*block.walked()]
