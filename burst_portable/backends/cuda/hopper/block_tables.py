"""Launch tables of the Hopper kernels: which inner blocks each outer block visits, in runs, from a list of tiles.

Forward has query blocks outside and walks over keys; backward has key blocks outside and walks over queries. Per
outer block the table holds the blocks that a band or a border cuts, each with its bounds, and the full blocks as
runs, so that its size follows the borders of the mask and not its area. One flat list of int32::

    work    16 a block    outer start, runs at, runs, full blocks, masked at, masked blocks, outer stop, 0, one masked
                          block
    runs    2 a run       first inner index, number of blocks: all that is visited, in order, but for the peeled one
    masked  8 a block     first inner index, inner start, stop, outer start, stop, lo, hi, 1 if it shows all

The forward peels one masked block off its loop: that one stands in the work row itself, so that one load finds
all that a program begins with. Then come its full blocks, then the masked rest; the backward begins with the masked
ones. "at" counts int32 from the list's beginning. Blocks start anywhere (inner ones of the backward at multiples of
4). A masked block shows the pairs with inner in [start, stop), outer in
[start, stop), lo <= outer - inner <= hi.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise

from burst_portable.planning.tiles import Tile, Tiles

_WORK = 16
_HIDDEN = (0, 0, 0, 0, 0, 0, 0, 0)  # a masked block that shows nothing
SHORT = 64  # inner blocks: shorter work need not be divided
_LONG = 4  # outer blocks: a document of this many has blocks of its own
_PART = 8  # inner blocks: a shorter part costs more by adding at its end than it saves

ABREAST = 32  # query blocks of a head that run side by side, and how many MiB of K and V apart they may be in the L2

Span = tuple[int, int]
"""[start, stop) of outer indices. A block's is shorter than others' where the next starts at a document's start."""


@dataclass(frozen=True, slots=True)
class LaunchTable:
    """One launch table, before it is on a device: its int32 numbers, and how many outer blocks are launched a head.

    long: from the first to the last outer block that visits so many more than the others that it is better divided.
    longest, total: inner blocks that one visits at most, and all together.
    """

    numbers: list[int]
    blocks: int
    long: Span | None = None
    longest: int = 0
    total: int = 0


@dataclass(slots=True)
class _Block:
    """What one outer block visits. banded: a band cuts one of its tiles, so that its neighbours visit more or less."""

    runs: list[tuple[int, int]] = field(default_factory=list)
    masked: list[tuple[int, ...]] = field(default_factory=list)
    banded: bool = False

    @property
    def full(self) -> int:
        return sum(count for _, count in self.runs)

    @property
    def length(self) -> int:
        return self.full + len(self.masked)


@dataclass(frozen=True, slots=True)
class Walk:
    """One direction: block sizes and which padding does no harm.

    outer_padding: whether a kernel may treat outer indices from a block's stop on as seen (forward: they are never
    stored).
    inner_length: where padding begins, if a kernel may treat padded rows as seen (backward: padded queries have LSE
    -inf), else None.
    inner_align: where inner blocks may start: TMA reads a row of float32 from multiples of 16 bytes on.
    """

    outer: int
    inner: int
    outer_padding: bool = False
    inner_length: int | None = None
    inner_align: int = 1


def forward_table(
    tiles: Tiles, rows: int, q_block: int, k_block: int, every_block: bool, mebibyte: int = 1 << 30
) -> LaunchTable:
    """Query blocks outside. Each has at least one masked block, the one that is peeled.

    Args:
        rows: length of the queries.
        every_block: launch blocks that see nothing as well, for they must write 0 and -inf.
        mebibyte: inner blocks whose K and V are so large.
    """
    spans = _spans(tiles, rows, q_block)
    blocks = _collect(tiles, Walk(q_block, k_block, outer_padding=True), spans)
    if every_block:
        for span in spans:
            blocks.setdefault(span, _Block(masked=[_HIDDEN]))
    for number, (span, block) in enumerate(blocks.items()):
        if not block.masked:
            _peel(block, span, k_block)
        if not block.banded and block.length >= 2 * ABREAST * mebibyte:
            skip = number % ABREAST * mebibyte
            block.runs = [part for run in block.runs for part in _apart(run, skip, k_block)]
    return _pack(blocks.items(), peel=True)


def backward_table(
    tiles: Tiles,
    rows: int,
    q_block: int,
    k_block: int,
    every_block_of: int = 0,
    *,
    apart: Span | None = None,
    fill: tuple[int, int] | None = None,
) -> LaunchTable:
    """Key blocks outside, some more than once: all add to their gradients, so that a long one may be divided.

    Args:
        rows: length of the queries.
        every_block_of: length of the keys, if blocks write their gradients instead: none is divided then, and those
            that nobody sees are launched as well, for they must write 0.
        apart: whole blocks of keys, of these, that another launch serves: no tile may reach them.
        fill: heads and multiprocessors; blocks are divided so that all parts of these heads end together.
    """
    turned = Tiles([Tile(t.k_start, t.k_stop, t.q_start, t.q_stop, -t.hi, -t.lo) for t in tiles])
    walk = Walk(k_block, q_block, inner_length=rows, inner_align=4)
    keys = max((t.q_stop for t in turned), default=0)
    spans = _spans(turned, every_block_of or keys, k_block, apart or ())
    if apart is not None:
        spans = [span for span in spans if not apart[0] <= span[0] < apart[1]]
    collected = _collect(turned, walk, spans)
    usual = _longest_of(collected)
    long = [span for span, block in collected.items() if block.length > usual]
    most = _filling([block.length for block in collected.values()], *fill) if fill else usual
    if every_block_of:
        collected |= {span: _Block() for span in spans if span not in collected}
    blocks = []
    for span, block in collected.items():
        block.runs = [part for run in block.runs for part in _turned(run, span[0], walk.inner)]
        divided = [block] if every_block_of else _divided(block, most, walk.inner)
        blocks += [(span, part) for part in divided]
    return _pack(blocks, peel=False, long=(min(long)[0], max(long)[1]) if long else None)


def _grid(start: int, stop: int, size: int) -> list[Span]:
    return [(at, min(at + size, stop)) for at in range(start, stop, size)]


def _spans(tiles: Iterable[Tile], length: int, size: int, cuts: Iterable[int] = ()) -> list[Span]:
    """Outer blocks, from each long document's start on: the diagonal of all its blocks is then in one inner block.

    A block that stops short costs as much as a whole one, so that short documents are not worth one. Blocks also start
    at `cuts`.

             16 keys a block, a document of 40 rows from row 8 on
        0   #...........         0    #...........     rows 0 to 7
        8   .#..........         8    .#..........
        16  .##.........         24   .##.........
        32  .###........         40   .###........
    """
    bounds = sorted({t.q_start for t in tiles if 0 < t.q_start < length} | {length})
    long = {bound for bound, following in pairwise(bounds) if following - bound >= _LONG * size}
    starts = sorted({0} | long | {cut for cut in cuts if 0 < cut < length})
    return [span for start, stop in pairwise([*starts, length]) for span in _grid(start, stop, size)]


def _longest_of(blocks: dict[Span, _Block]) -> int:
    """How many inner blocks a block may visit. A head's long ones begin first, but the last head's end last."""
    total = sum(block.length for block in blocks.values())
    return max(SHORT, 2 * -(-total // max(1, len(blocks))))


def _filling(lengths: list[int], heads: int, processors: int) -> int:
    """How many inner blocks a part may visit so that the last of all heads' parts ends soonest."""

    def ends(most: int) -> int:
        parts = heads * sum(-(-length // most) for length in lengths)
        return -(-parts // processors) * (most + 1)  # what begins and ends a part takes about as long as a block

    longest = max(lengths, default=_PART)
    return min((max(_PART, -(-longest // parts)) for parts in range(1, processors + 1)), key=ends)


def _divided(block: _Block, most: int, inner: int) -> Iterator[_Block]:
    """Parts of one block, about equally long, none longer than `most`."""
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


def _collect(tiles: Iterable[Tile], walk: Walk, spans: list[Span]) -> dict[Span, _Block]:
    blocks: dict[Span, _Block] = {}
    starts = [start for start, _ in spans]
    for tile in tiles:
        for at in range(bisect_right(starts, tile.q_start) - 1, bisect_left(starts, tile.q_stop)):
            _visit(blocks.setdefault(spans[at], _Block()), spans[at], tile, walk)
    return {span: block for span, block in blocks.items() if block.length}


def _visit(block: _Block, span: Span, tile: Tile, walk: Walk) -> None:
    """Add what one outer block sees of one tile. Its inner blocks start at the first index that it sees."""
    block.banded |= not tile.full
    top, bottom = span
    first, last = max(top, tile.q_start), min(bottom, tile.q_stop) - 1
    start, stop = max(tile.k_start, first - tile.hi), min(tile.k_stop, last - tile.lo + 1)
    start -= start % walk.inner_align
    count = -(-(stop - start) // walk.inner)
    whole_outer = first == top and last + 1 == bottom and (walk.outer_padding or bottom - top == walk.outer)
    full_from, full_to = count, count
    if whole_outer:
        # what every outer index of the block sees
        seen_start, seen_stop = max(tile.k_start, last - tile.hi), min(tile.k_stop, first - tile.lo + 1)
        if seen_stop == walk.inner_length:
            seen_stop = start + count * walk.inner
        full_from = min(count, max(0, -(-(seen_start - start) // walk.inner)))
        full_to = max(full_from, min(count, (seen_stop - start) // walk.inner))
    if full_to > full_from:
        block.runs.append((start + full_from * walk.inner, full_to - full_from))
    for i in (*range(full_from), *range(full_to, count)):
        at = start + i * walk.inner
        block.masked.append((at, tile.k_start, tile.k_stop, first, last + 1, tile.lo, tile.hi, 0))


def _peel(block: _Block, span: Span, inner: int) -> None:
    """Treat the first full block as a masked one: a mask that shows all of it."""
    (start, count), *rest = block.runs
    block.runs = [(start + inner, count - 1), *rest] if count > 1 else rest
    block.masked.append((start, start, start + inner, *span, -(1 << 30), 1 << 30, 1))


def _turned(run: tuple[int, int], outer: int, inner: int) -> Iterator[tuple[int, int]]:
    """Walk a run from the outer block's own index on, where the run holds it, and then the run's beginning.

    Programs that run side by side would otherwise add to the same rows of dq at the same time.
    """
    start, count = run
    skip = (outer - start) // inner
    if 0 < skip < count:
        yield start + skip * inner, count - skip
        yield start, skip
    else:
        yield run


def _apart(run: tuple[int, int], skip: int, inner: int) -> Iterator[tuple[int, int]]:
    """Walk a run from some blocks on, and then its beginning.

    Programs that walk boxes equally long stay abreast, and where the L2 does not hold those all would wait for the same
    block from memory: each begins a MiB further on than the one before it. Those of a causal square drift apart.
    """
    start, count = run
    if 0 < skip < count:
        yield start + skip * inner, count - skip
        yield start, skip
    else:
        yield run


def _pack(blocks: Iterable[tuple[Span, _Block]], *, peel: bool, long: Span | None = None) -> LaunchTable:
    """Long blocks first: what is launched last should be short."""
    order = sorted(blocks, key=lambda item: -item[1].length)
    work: list[int] = []
    runs: list[int] = []
    masked: list[int] = []
    runs_at = _WORK * len(order)
    masked_at = runs_at + 2 * sum(len(block.runs) + len(block.masked) - peel for _, block in order)
    for (start, stop), block in order:
        at, masked_now = runs_at + len(runs), masked_at + len(masked)
        if peel:
            first, *rest = block.masked
            walked = [*block.runs, *((entry[0], 1) for entry in rest)]
        else:
            first, rest = _HIDDEN, block.masked
            walked = [*((entry[0], 1) for entry in rest), *block.runs]
        work += (start, at, len(walked), block.full, masked_now, len(rest), stop, 0, *first)
        for run in walked:
            runs += run
        for entry in rest:
            masked += entry
    lengths = [block.length for _, block in order]
    return LaunchTable(work + runs + masked, len(order), long, max(lengths, default=0), sum(lengths))
