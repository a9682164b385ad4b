"""Make tiles from a mask and a layout. No other module does.

The mask defines which pairs of global positions are visible, the layout which positions a block has. A `Tile` is a box
of *local* rows and columns of one pair of blocks, with a diagonal band in local indices. A kernel is launched on a list
of tiles. The tiles of a pair are disjoint, and no row or column of a tile is empty. Tiles whose union is again a banded
box are fused: causal attention under zigzag and striped layouts has one tile per step, as in code written for it::

    zigzag, rank 1 of 2 against itself: chunks 1 and 2 of 4        keys    1   2
                                                            queries 1      ◣          three tiles, fused
                                                                    2      ■   ◣      into one ◣

The cost does not grow with the number of tokens: positions are never listed, and regions are found by bisection.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from typing import NamedTuple

from burst_portable.errors import LayoutError, ShapeError, shown
from burst_portable.layout import Segment, cut
from burst_portable.mask import Mask, Region, band_area, first_overlap
from burst_portable.utils.cache import Cache
from burst_portable.utils.values import as_int

Box = tuple[int, int, int, int, int, int]
"""q_start, q_stop, k_start, k_stop, lo, hi: see `planning.tiles.Tile`."""
_CountedBox = tuple[Box, int]
"""A box and its number of visible pairs."""
_FUSE_PAIRWISE = 16  # with more boxes, only neighbors are tried: hundreds of documents do not fuse anyway


def make_box(q_start: int, q_stop: int, k_start: int, k_stop: int, lo: int, hi: int) -> Box | None:
    """Return the part of a box that a band covers, without empty rows and columns; None if there is none.

    `make_tile` returns the same as a `Tile`. While there are many, boxes are tuples, which are made faster.
    """
    # Comparisons instead of calls of min and max: this runs for every region of every pair of blocks.
    least, most = q_start - k_stop + 1, q_stop - 1 - k_start
    if lo < least:
        lo = least
    if hi > most:
        hi = most
    if lo > hi or q_start >= q_stop or k_start >= k_stop:
        return None
    top, bottom, left, right = k_start + lo, k_stop + hi, q_start - hi, q_stop - lo
    return (
        top if top > q_start else q_start,
        bottom if bottom < q_stop else q_stop,
        left if left > k_start else k_start,
        right if right < k_stop else k_stop,
        lo,
        hi,
    )


def count_pairs(box: Box) -> int:
    """Return the number of visible pairs in a box."""
    q_start, q_stop, k_start, k_stop, lo, hi = box
    offset = q_start - k_start
    return band_area(q_stop - q_start, k_stop - k_start, lo - offset, hi - offset)


def fuse(boxes: Sequence[Box]) -> list[Box]:
    """Return the same pairs in fewer boxes, by fusing boxes whose union is a banded box.

    Boxes are disjoint, so the smallest banded box around some is their union if it has as many pairs as they have.
    """
    counted = [(box, count_pairs(box)) for box in boxes]
    if len(counted) < 2:
        return list(boxes)
    if whole := _union(boxes, sum(num_pairs for _, num_pairs in counted)):
        return [whole[0]]
    counted.sort(key=_corner)
    if len(counted) > _FUSE_PAIRWISE:
        return list(_fuse_neighbors(counted))
    index = 0
    while index < len(counted):
        for other in range(index + 1, len(counted)):
            if joined := _union_of_two(counted[index], counted[other]):
                del counted[other]
                counted[index] = joined
                index = -1  # a larger box may fuse with boxes that were tried before
                break
        index += 1
    return [box for box, _ in counted]


def _fuse_neighbors(counted: Sequence[_CountedBox]) -> Iterator[Box]:
    """Yield the boxes, each fused with the boxes right after it while their union is a banded box."""
    last = counted[0]
    for one in counted[1:]:
        if joined := _union_of_two(last, one):
            last = joined
        else:
            yield last[0]
            last = one
    yield last[0]


def _union_of_two(one: _CountedBox, later: _CountedBox) -> _CountedBox | None:
    """Return the union of two boxes sorted by rows, or None. One comparison excludes most pairs, such as documents."""
    (_, q_stop, _, k_stop, _, _), (q_start, _, k_start, _, _, hi) = one[0], later[0]
    if q_start >= q_stop and k_start >= k_stop and q_start - k_start < hi:
        return None  # a box around both would contain the pair left of the later box's first pair
    return _union((one[0], later[0]), one[1] + later[1])


def _union(boxes: Sequence[Box], num_pairs: int) -> _CountedBox | None:
    """Return the banded box that is the union of these disjoint boxes with `num_pairs` pairs in total, or None."""
    q_starts, q_stops, k_starts, k_stops, los, his = zip(*boxes, strict=True)
    box = make_box(min(q_starts), max(q_stops), min(k_starts), max(k_stops), min(los), max(his))
    assert box is not None, "none of them is empty"
    return (box, num_pairs) if count_pairs(box) == num_pairs else None


def _corner(one: _CountedBox) -> tuple[int, int]:
    return one[0][0], one[0][2]


_COUNTED_BLOCKS = 64  # blocks of rows; above this, `visited` is estimated
_CACHED_PAIRS = 1 << 14  # pairs of blocks whose tiles are cached
_LINEAR_SEARCH = 4  # segments; up to this many, a linear search is faster than bisection


@dataclass(frozen=True, slots=True)
class Tile:
    """Rows [q_start, q_stop) see columns [k_start, k_stop) if lo <= row - column <= hi, in local indices."""

    q_start: int
    q_stop: int
    k_start: int
    k_stop: int
    lo: int
    hi: int

    @property
    def rows(self) -> int:
        return self.q_stop - self.q_start

    @property
    def columns(self) -> int:
        return self.k_stop - self.k_start

    @property
    def num_pairs(self) -> int:
        """Number of visible pairs."""
        return count_pairs((self.q_start, self.q_stop, self.k_start, self.k_stop, self.lo, self.hi))

    @property
    def full(self) -> bool:
        """Return whether all pairs of the box are visible."""
        return self.lo <= self.q_start - self.k_stop + 1 and self.hi >= self.q_stop - 1 - self.k_start

    def shifted(self, rows: int, columns: int) -> Tile:
        """Return the tile with all row and column indices shifted."""
        return Tile(
            self.q_start + rows,
            self.q_stop + rows,
            self.k_start + columns,
            self.k_stop + columns,
            self.lo + rows - columns,
            self.hi + rows - columns,
        )

    def clipped(self, q_start: int, q_stop: int, k_start: int, k_stop: int) -> Tile | None:
        """Return the part of the tile inside a box, without empty rows and columns; None if there is none."""
        return make_tile(
            max(self.q_start, q_start),
            min(self.q_stop, q_stop),
            max(self.k_start, k_start),
            min(self.k_stop, k_stop),
            self.lo,
            self.hi,
        )

    def visited(self, block: int, down: int = 0) -> int:
        """Return the pairs, including hidden ones, that a kernel computes in blocks of `block` rows and columns.

        Blocks of rows begin at multiples of `block`, blocks of columns at the first column that their rows see.
        `down`: rows by which the tile is shifted before.
        """
        if block == 1:
            return self.num_pairs
        first, past = (self.q_start + down) // block, -(-(self.q_stop + down) // block)
        slanted = (self.lo > self.q_start - self.k_stop + 1) + (self.hi < self.q_stop - 1 - self.k_start)
        if past - first > _COUNTED_BLOCKS:  # little is hidden in the last block of a row
            return self.num_pairs + slanted * self.rows * block // 2
        if not slanted:
            return (past - first) * -(-self.columns // block) * block * block
        blocks = 0
        for top in range(first * block - down, past * block - down, block):
            upper, lower = max(top, self.q_start), min(top + block, self.q_stop) - 1
            start, stop = max(self.k_start, upper - self.hi), min(self.k_stop, lower - self.lo + 1)
            blocks += -(-(stop - start) // block)
        return blocks * block * block


class Positions(tuple[Segment, ...]):
    """The global positions of the rows of a block, in their order in memory. The hash is computed once."""

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:  # kernels cache tensors of positions by it
        return tuple.__hash__(self)


class Tiles(tuple[Tile, ...]):
    """The disjoint tiles of one pair of blocks. Properties of all tiles, and their hash, are computed once.

    Attributes:
        positions: Global positions of the rows and of the columns of the launch, in a plan with dropout; else None.
            Equal tiles may have different positions.
    """

    positions: tuple[Positions, Positions] | None
    _visited: dict[tuple[int, int], int]
    _in_rows: dict[tuple[int, int], Tiles]
    _ranges: dict[tuple[bool, int], tuple[tuple[int, int], ...]]

    def __new__(cls, tiles: Iterable[Tile] = (), positions: tuple[Positions, Positions] | None = None) -> Tiles:
        self = super().__new__(cls, tiles)
        self.positions = positions
        self._visited, self._in_rows, self._ranges = {}, {}, {}
        return self

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:  # kernels cache launch tables by it
        return tuple.__hash__(self)

    @cached_property
    def num_pairs(self) -> int:
        """Visible pairs of all tiles."""
        return sum([t.num_pairs for t in self])

    @cached_property
    def heights(self) -> tuple[int, int]:
        """(rows of all tiles, rows of the tallest tile). A row in several tiles counts once per tile."""
        rows = [t.q_stop - t.q_start for t in self]
        return sum(rows), max(rows, default=0)

    @cached_property
    def columns(self) -> int:
        """Columns of all tiles. A column in several tiles counts once per tile."""
        return sum(t.k_stop - t.k_start for t in self)

    @cached_property
    def box(self) -> tuple[int, int, int, int]:
        """(q_start, q_stop, k_start, k_stop) of the smallest box around all tiles, of which there must be one."""
        return (
            min([t.q_start for t in self]),
            max([t.q_stop for t in self]),
            min([t.k_start for t in self]),
            max([t.k_stop for t in self]),
        )

    @cached_property
    def covered(self) -> tuple[int, int]:
        """(rows, columns) that are in at least one tile, each counted once."""
        return covered([(t.q_start, t.q_stop) for t in self]), covered([(t.k_start, t.k_stop) for t in self])

    def ranges(self, *, is_columns: bool, least_gap: int) -> tuple[tuple[int, int], ...]:
        """Return the ranges of the rows or columns of the tiles. Gaps of less than `least_gap` are included. Cached."""
        key = is_columns, least_gap
        if (found := self._ranges.get(key)) is None:
            found = self._ranges[key] = tuple(self._make_ranges(is_columns, least_gap))
        return found

    def _make_ranges(self, is_columns: bool, least_gap: int) -> list[tuple[int, int]]:
        spans = [(t.k_start, t.k_stop) if is_columns else (t.q_start, t.q_stop) for t in self]
        if len(spans) > 1:
            spans.sort()
        joined = spans[:1]
        for start, stop in spans[1:]:
            first, end = joined[-1]
            if start < end + least_gap:
                joined[-1] = first, max(end, stop)
            else:
                joined.append((start, stop))
        return joined

    def packed(self, ranges: Sequence[tuple[int, int]], *, is_columns: bool) -> Tiles:
        """Return the tiles with their rows or columns counted in a message of these ranges, one after the other."""
        starts = [start for start, _ in ranges]
        before = list(accumulate((stop - start for start, stop in ranges), initial=0))

        def shift(first: int) -> int:
            index = bisect_right(starts, first) - 1
            return before[index] - starts[index]

        if is_columns:
            return Tiles(t.shifted(0, shift(t.k_start)) for t in self)
        return Tiles(t.shifted(shift(t.q_start), 0) for t in self)

    def in_rows(self, start: int, stop: int) -> Tiles:
        """Return the parts of the tiles in rows [start, stop), with row indices counted from `start`. Cached."""
        if (found := self._in_rows.get((start, stop))) is None:
            parts = (tile.clipped(start, stop, tile.k_start, tile.k_stop) for tile in self)
            positions = self.positions and (Positions(cut(self.positions[0], start, stop)), self.positions[1])
            found = self._in_rows[start, stop] = Tiles((part.shifted(-start, 0) for part in parts if part), positions)
        return found

    def visited(self, block: int, down: int = 0) -> int:
        """Return the sum of `Tile.visited`."""
        key = block, down % block
        if key not in self._visited:
            self._visited[key] = sum(t.visited(*key) for t in self)
        return self._visited[key]


def covered(ranges: Iterable[tuple[int, int]]) -> int:
    """Return the number of indices in at least one of these ranges."""
    count = end = 0
    for start, stop in sorted(ranges):
        if stop > end:
            count += stop - max(start, end)
            end = stop
    return count


def make_tile(q_start: int, q_stop: int, k_start: int, k_stop: int, lo: int, hi: int) -> Tile | None:
    """Return the tile of a box and a band, without empty rows and columns; None if no pair is visible.

    Row i sees column j if lo <= i - j <= hi.

    Args:
        q_start: First row, an index in the block of queries.
        q_stop: End of the rows.
        k_start: First column, an index in the block of keys.
        k_stop: End of the columns.
        lo: Lower bound of the band; 0 for a causal mask, ``-mask.UNBOUNDED`` for none.
        hi: Upper bound of the band; `mask.UNBOUNDED` for none.
    """
    box = make_box(q_start, q_stop, k_start, k_stop, lo, hi)
    return Tile(*box) if box else None


def checked_tiles(tiles: Iterable[Tile], rows: int, columns: int) -> Tiles:
    """Check tiles that a caller made for a block of this size, and return them without empty rows and columns.

    Raises:
        ShapeError: A value is no tile, a tile is empty or exceeds its block, or two tiles overlap.
    """
    allowed = f"ints; starts below stops, within {rows} rows and {columns} columns; lo <= hi"
    made: list[Tile] = []
    try:
        listed: list[object] = list(tiles)
    except TypeError:
        listed = [tiles]
    for tile in listed:
        numbers = [as_int(getattr(tile, name)) for name in Tile.__slots__] if isinstance(tile, Tile) else [None]
        if None in numbers:
            raise ShapeError("this is not a tile", got=shown(tile), allowed=allowed)
        t = Tile(*(n for n in numbers if n is not None))
        if not (0 <= t.q_start < t.q_stop <= rows and 0 <= t.k_start < t.k_stop <= columns and t.lo <= t.hi):
            raise ShapeError("a tile is empty or exceeds its block", got=t, allowed=allowed)
        if visible := make_tile(t.q_start, t.q_stop, t.k_start, t.k_stop, t.lo, t.hi):
            made.append(visible)
    boxes = [Region(t.q_start, t.q_stop, t.k_start, t.k_stop, t.lo, t.hi) for t in made]
    if pair := first_overlap(sorted(boxes, key=lambda r: r.q_start)):
        got = f"{pair[0]} and {pair[1]}"
        next_step = "end one where the other begins"
        raise ShapeError("two tiles overlap, so their pairs would count twice", got=got, next_step=next_step)
    return Tiles(made)


def find_tiles(mask: Mask, queries: Sequence[Segment], keys: Sequence[Segment]) -> Tiles:
    """Return the fused tiles of a block of queries and a block of keys, with their positions.

    Raises:
        LayoutError: Segments have different steps, so that their band is no band of local indices.
    """
    tiles = BlockPairs(mask, (queries,), (keys,)).tiles(0, 0)
    return Tiles(tiles, (Positions(queries), Positions(keys)))


class BlockPairs:
    """A mask between the blocks of all ranks. The tiles of a pair are computed once, for all plans that use them."""

    def __init__(self, mask: Mask, queries: Sequence[Sequence[Segment]], keys: Sequence[Sequence[Segment]]) -> None:
        self._mask, self._queries, self._keys = mask, queries, keys
        self._rows: dict[int, list[_RegionRows]] = {}
        self._searches: dict[int, _KeySearch] = {}
        self._sees: dict[tuple[int, int], bool] = {}
        self._tiles: Cache[tuple[int, int], Tiles] = Cache(_CACHED_PAIRS)

    def sees(self, q_owner: int, k_owner: int) -> bool:
        """Return whether a query of one rank sees a key of the other."""
        pair = q_owner, k_owner
        if pair not in self._sees:
            self._sees[pair] = next(self._pair_boxes(q_owner, k_owner), None) is not None
        return self._sees[pair]

    def tiles(self, q_owner: int, k_owner: int) -> Tiles:
        """Return the tiles of one rank's queries and the other's keys; cached for a few thousand pairs."""
        found = self._tiles.get((q_owner, k_owner))
        if found is None:  # read once: another thread, planning for another rank, may clear the cache
            boxes = fuse(list(self._pair_boxes(q_owner, k_owner)))
            found = self._tiles.keep((q_owner, k_owner), Tiles(Tile(*box) for box in boxes))
        return found

    def num_pairs(self, q_owner: int, k_owner: int) -> int:
        """Return the number of visible (query, key) pairs of two blocks, without making tiles."""
        return sum(map(count_pairs, self._pair_boxes(q_owner, k_owner)))

    def _pair_boxes(self, q_owner: int, k_owner: int) -> Iterator[Box]:
        """Yield the boxes of one rank's queries and the other's keys, before they are fused."""
        if q_owner not in self._rows:
            self._rows[q_owner] = list(_region_rows(self._mask, self._queries[q_owner]))
        if k_owner not in self._searches:
            self._searches[k_owner] = _KeySearch(self._keys[k_owner])
        return _visible_boxes(self._rows[q_owner], self._searches[k_owner])


class _RegionRows(NamedTuple):
    """Rows of a segment of queries that are in a region, and the positions of the keys that they may see."""

    region: Region
    segment: Segment
    offset: int  # of the segment's first row in its block
    start: int
    stop: int
    first_key: int
    last_key: int


def _region_rows(mask: Mask, queries: Sequence[Segment]) -> Iterator[_RegionRows]:
    """Yield the rows of a block of queries for each region that contains some."""
    offset = 0
    for q in queries:
        first, last = q.start, q.last
        for region in mask.regions_of_rows(first, last + 1):
            start, stop = q.within(region.q_start, region.q_stop)
            keys = max(region.k_start, first - region.hi), min(region.k_stop - 1, last - region.lo)
            yield _RegionRows(region, q, offset, offset + start, offset + stop, *keys)
        offset += q.count


def _visible_boxes(rows: Iterable[_RegionRows], keys: _KeySearch) -> Iterator[Box]:
    """Yield the boxes in which rows see a block of keys: at most one per region and segment of keys."""
    for some in rows:
        for k, k_offset in keys.between(some.first_key, some.last_key):
            if box := _visible_box(some, k, k_offset):
                yield box


class _KeySearch:
    """Find the segments of a block of keys that may contain positions of a range, by bisection if there are many."""

    def __init__(self, keys: Sequence[Segment]) -> None:
        self._pairs = list(zip(keys, accumulate((k.count for k in keys), initial=0), strict=False))
        self._starts: list[int] = []
        if len(keys) > _LINEAR_SEARCH:
            rising = sorted(self._pairs, key=lambda pair: pair[0].start)
            if all(a.last < b.start for (a, _), (b, _) in pairwise(rising)):
                self._pairs = rising
                self._starts, self._lasts = [k.start for k, _ in rising], [k.last for k, _ in rising]

    def between(self, first: int, last: int) -> Sequence[tuple[Segment, int]]:
        """Return the segments that may overlap [first, last], each with the local index of its first row."""
        if not self._starts:
            return self._pairs
        return self._pairs[bisect_left(self._lasts, first) : bisect_right(self._starts, last)]


def _visible_box(rows: _RegionRows, k: Segment, k_offset: int) -> Box | None:
    """Return the box in which rows of one region see one segment of keys; None if no pair is visible."""
    region, q, q_offset, q_start, q_stop, _, _ = rows
    if region.k_start > k.last or region.k_stop <= k.start:
        return None
    step = q.step
    if step != k.step:
        raise LayoutError(
            "queries and keys are laid out with different steps",
            got=f"{q.step} and {k.step}",
            next_step="use layouts with the same step for both",
        )
    k_first, k_past = k.within(region.k_start, region.k_stop)
    # Global q - k of row i and column j is base + step * (i - j): the band, divided by the step.
    base = (q.start - k.start) - step * (q_offset - k_offset)
    lo, hi = -((base - region.lo) // step), (region.hi - base) // step
    return make_box(q_start, q_stop, k_offset + k_first, k_offset + k_past, lo, hi)
