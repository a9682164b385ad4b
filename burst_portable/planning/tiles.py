"""Tiles: the one place where tiles are made of a mask and a layout.

The mask says which global positions see each other; the layout says which positions a block holds. A `Tile` is a box
of *local* rows and columns of one pair of blocks, with a band across it in local indices; a kernel is launched on a
list of tiles. The tiles of a pair are disjoint, no row or column of a tile is empty, and neighbours whose union is
again one banded box are fused: causal work under zigzag and striped layouts is one tile per step, as in code written by
hand for it::

    zigzag, rank 1 of 2 against itself: chunks 1 and 2 of 4        keys    1   2
                                                            queries 1      ◣          three tiles, fused
                                                                    2      ■   ◣      into one ◣

Nothing here grows with the number of tokens: positions are never listed, regions are found by bisection.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from typing import NamedTuple

from burst_portable.errors import LayoutError, ShapeError, shown
from burst_portable.layout import Segment
from burst_portable.mask import Mask, Region, band_area, first_overlap
from burst_portable.utils.values import as_int

Box = tuple[int, int, int, int, int, int]
"""q_start, q_stop, k_start, k_stop, lo, hi: see `planning.tiles.Tile`."""
_Piece = tuple[Box, int]
"""A box and its area."""
_FUSE_PAIRWISE = 16  # with more, only neighbours are tried: hundreds of documents do not fuse anyway


def make_box(q_start: int, q_stop: int, k_start: int, k_stop: int, lo: int, hi: int) -> Box | None:
    """The part of a box that a band lets through, without empty rows and columns; None if nothing is seen.

    `make_tile` returns the same as a `Tile`: boxes are tuples while there are many, since those are made faster.
    """
    # Comparisons, where min and max would be calls: this runs for every region of every pair of blocks.
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


def box_area(box: Box) -> int:
    """Pairs that it holds."""
    q_start, q_stop, k_start, k_stop, lo, hi = box
    offset = q_start - k_start
    return band_area(q_stop - q_start, k_stop - k_start, lo - offset, hi - offset)


def fused(boxes: Sequence[Box]) -> list[Box]:
    """The same pairs in fewer boxes, where the union of some is itself a banded box.

    Boxes are disjoint, so if the smallest banded box around some has the sum of their areas, it is their union.
    """
    pieces = [(box, box_area(box)) for box in boxes]
    if len(pieces) < 2:
        return list(boxes)
    if whole := _union(boxes, sum(num_pairs for _, num_pairs in pieces)):
        return [whole[0]]
    pieces.sort(key=_corner)
    if len(pieces) > _FUSE_PAIRWISE:
        return list(_fused_neighbours(pieces))
    index = 0
    while index < len(pieces):
        for other in range(index + 1, len(pieces)):
            if joined := _union_of_two(pieces[index], pieces[other]):
                del pieces[other]
                pieces[index] = joined
                index = -1  # a larger one may fit what was tried before
                break
        index += 1
    return [box for box, _ in pieces]


def _fused_neighbours(pieces: Sequence[_Piece]) -> Iterator[Box]:
    """Each box fused with the ones right after it, as long as they fit."""
    last = pieces[0]
    for piece in pieces[1:]:
        if joined := _union_of_two(last, piece):
            last = joined
        else:
            yield last[0]
            last = piece
    yield last[0]


def _union_of_two(piece: _Piece, later: _Piece) -> _Piece | None:
    """The union of two boxes sorted by rows. Most pairs, such as two documents, are ruled out by one comparison."""
    (_, q_stop, _, k_stop, _, _), (q_start, _, k_start, _, _, hi) = piece[0], later[0]
    if q_start >= q_stop and k_start >= k_stop and q_start - k_start < hi:
        return None  # left of the later one's first pair is a pair of neither, which a box around both would hold
    return _union((piece[0], later[0]), piece[1] + later[1])


def _union(boxes: Sequence[Box], num_pairs: int) -> _Piece | None:
    """The banded box that is exactly the union of these disjoint ones, which hold `area` pairs in all; or None."""
    q_starts, q_stops, k_starts, k_stops, los, his = zip(*boxes, strict=True)
    box = make_box(min(q_starts), max(q_stops), min(k_starts), max(k_stops), min(los), max(his))
    assert box is not None, "none of them is empty"
    return (box, num_pairs) if box_area(box) == num_pairs else None


def _corner(piece: _Piece) -> tuple[int, int]:
    return piece[0][0], piece[0][2]


_COUNTED = 64  # blocks of rows; above this, `visited` is estimated
_PAIRS_KEPT = 1 << 14  # pairs of blocks whose tiles are kept
_SEARCHED = 4  # segments; up to this many, looking at each is faster than bisection


@dataclass(frozen=True, slots=True)
class Tile:
    """Rows [q_start, q_stop) see columns [k_start, k_stop) where lo <= row - column <= hi, all local."""

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
        """The number of pairs in it."""
        return box_area((self.q_start, self.q_stop, self.k_start, self.k_stop, self.lo, self.hi))

    @property
    def full(self) -> bool:
        """Whether the band hides nothing of the box."""
        return self.lo <= self.q_start - self.k_stop + 1 and self.hi >= self.q_stop - 1 - self.k_start

    def shifted(self, rows: int, columns: int) -> Tile:
        """The same pairs, with all row and column indices shifted."""
        return Tile(
            self.q_start + rows,
            self.q_stop + rows,
            self.k_start + columns,
            self.k_stop + columns,
            self.lo + rows - columns,
            self.hi + rows - columns,
        )

    def clipped(self, q_start: int, q_stop: int, k_start: int, k_stop: int) -> Tile | None:
        """The part of it inside a box, without empty rows and columns; None if there is none."""
        return make_tile(
            max(self.q_start, q_start),
            min(self.q_stop, q_stop),
            max(self.k_start, k_start),
            min(self.k_stop, k_stop),
            self.lo,
            self.hi,
        )

    def visited(self, block: int, down: int = 0) -> int:
        """Pairs, including hidden ones, that a kernel computes if it takes `block` rows and columns at once.

        Blocks of rows begin at multiples of `block`, blocks of columns at the first column that their rows see.
        `down`: rows by which the tile is shifted first.
        """
        if block == 1:
            return self.num_pairs
        first, past = (self.q_start + down) // block, -(-(self.q_stop + down) // block)
        slanted = (self.lo > self.q_start - self.k_stop + 1) + (self.hi < self.q_stop - 1 - self.k_start)
        if past - first > _COUNTED:  # the last block of a row hides little
            return self.num_pairs + slanted * self.rows * block // 2
        if not slanted:
            return (past - first) * -(-self.columns // block) * block * block
        blocks = 0
        for top in range(first * block - down, past * block - down, block):
            upper, lower = max(top, self.q_start), min(top + block, self.q_stop) - 1
            start, stop = max(self.k_start, upper - self.hi), min(self.k_stop, lower - self.lo + 1)
            blocks += -(-(stop - start) // block)
        return blocks * block * block


class Tiles(tuple[Tile, ...]):
    """The disjoint tiles of one pair of blocks. Their common properties, and their hash, are computed once."""

    _visited: dict[tuple[int, int], int]
    _in_rows: dict[tuple[int, int], Tiles]

    def __new__(cls, tiles: Iterable[Tile] = ()) -> Tiles:
        self = super().__new__(cls, tiles)
        self._visited, self._in_rows = {}, {}
        return self

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:  # kernels look their launch tables up by it
        return tuple.__hash__(self)

    @cached_property
    def num_pairs(self) -> int:
        """The number of pairs in all of them."""
        return sum([t.num_pairs for t in self])

    @cached_property
    def heights(self) -> tuple[int, int]:
        """(rows of all of them together, rows of the tallest one); a row in several tiles counts in each."""
        rows = [t.q_stop - t.q_start for t in self]
        return sum(rows), max(rows, default=0)

    @cached_property
    def columns(self) -> int:
        """Columns of all of them together; a column in several tiles counts in each."""
        return sum(t.k_stop - t.k_start for t in self)

    @cached_property
    def box(self) -> tuple[int, int, int, int]:
        """(q_start, q_stop, k_start, k_stop) of the smallest box around them; there must be at least one tile."""
        return (
            min([t.q_start for t in self]),
            max([t.q_stop for t in self]),
            min([t.k_start for t in self]),
            max([t.k_stop for t in self]),
        )

    @cached_property
    def covered(self) -> tuple[int, int]:
        """(rows, columns) that are in any of them, each counted once."""
        return covered([(t.q_start, t.q_stop) for t in self]), covered([(t.k_start, t.k_stop) for t in self])

    def in_rows(self, start: int, stop: int) -> Tiles:
        """Their parts in rows [start, stop), with rows counted from there on; kept."""
        if (found := self._in_rows.get((start, stop))) is None:
            parts = (tile.clipped(start, stop, tile.k_start, tile.k_stop) for tile in self)
            found = self._in_rows[start, stop] = Tiles(part.shifted(-start, 0) for part in parts if part)
        return found

    def visited(self, block: int, down: int = 0) -> int:
        """`Tile.visited` of all of them."""
        key = block, down % block
        if key not in self._visited:
            self._visited[key] = sum(t.visited(*key) for t in self)
        return self._visited[key]


def covered(ranges: Iterable[tuple[int, int]]) -> int:
    """How many indices are in any of these ranges."""
    held = end = 0
    for start, stop in sorted(ranges):
        if stop > end:
            held += stop - max(start, end)
            end = stop
    return held


def make_tile(q_start: int, q_stop: int, k_start: int, k_stop: int, lo: int, hi: int) -> Tile | None:
    """The tile of a box and a band; None if the band leaves nothing of the box.

    Args:
        q_start, q_stop: rows of the block of queries, [start, stop).
        k_start, k_stop: columns, that is rows of the block of keys.
        lo, hi: row i sees column j where lo <= i - j <= hi; causal is lo = 0, and `mask.UNBOUNDED` is no bound.
    """
    box = make_box(q_start, q_stop, k_start, k_stop, lo, hi)
    return Tile(*box) if box else None


def checked_tiles(tiles: Iterable[Tile], rows: int, columns: int) -> Tiles:
    """Tiles that a user made for a block of this size, trimmed of empty rows and columns.

    Raises `ShapeError` for anything but a tile, for a tile that is empty or reaches past its block, and for two that
    overlap.
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
            raise ShapeError("a tile is empty or reaches past its block", got=t, allowed=allowed)
        if seen := make_tile(t.q_start, t.q_stop, t.k_start, t.k_stop, t.lo, t.hi):
            made.append(seen)
    boxes = [Region(t.q_start, t.q_stop, t.k_start, t.k_stop, t.lo, t.hi) for t in made]
    if pair := first_overlap(sorted(boxes, key=lambda r: r.q_start)):
        got = f"{pair[0]} and {pair[1]}"
        next_step = "end one where the other begins"
        raise ShapeError("two tiles overlap, so their pairs would count twice", got=got, next_step=next_step)
    return Tiles(made)


def find_tiles(mask: Mask, queries: Sequence[Segment], keys: Sequence[Segment]) -> Tiles:
    """All tiles of a block of queries against a block of keys, fused.

    Raises `LayoutError` when segments of different steps meet: their band would not be a band of indices.
    """
    return BlockPairs(mask, (queries,), (keys,)).tiles(0, 0)


class BlockPairs:
    """A mask between the blocks of all ranks. A pair's tiles are computed once, for every plan made with it."""

    def __init__(self, mask: Mask, queries: Sequence[Sequence[Segment]], keys: Sequence[Sequence[Segment]]) -> None:
        self._mask, self._queries, self._keys = mask, queries, keys
        self._rows: dict[int, list[_RegionRows]] = {}
        self._searches: dict[int, _KeySearch] = {}
        self._seen: dict[tuple[int, int], bool] = {}
        self._tiles: dict[tuple[int, int], Tiles] = {}

    def sees(self, q_owner: int, k_owner: int) -> bool:
        """Whether any query of one rank sees any key of the other."""
        pair = q_owner, k_owner
        if pair not in self._seen:
            self._seen[pair] = next(self._pair_boxes(q_owner, k_owner), None) is not None
        return self._seen[pair]

    def tiles(self, q_owner: int, k_owner: int) -> Tiles:
        """The tiles of one rank's queries against the other's keys; kept for a few thousand pairs."""
        pair = q_owner, k_owner
        found = self._tiles.get(pair)
        if found is None:  # read once: another thread, planning for another rank, may clear the dict
            if len(self._tiles) >= _PAIRS_KEPT:
                self._tiles.clear()
            self._tiles[pair] = found = Tiles(Tile(*box) for box in fused(list(self._pair_boxes(q_owner, k_owner))))
        return found

    def num_pairs(self, q_owner: int, k_owner: int) -> int:
        """How many (query, key) pairs of two blocks the mask lets through, without making tiles."""
        return sum(map(box_area, self._pair_boxes(q_owner, k_owner)))

    def _pair_boxes(self, q_owner: int, k_owner: int) -> Iterator[Box]:
        """The boxes of one rank's queries against the other's keys, before they are fused."""
        if q_owner not in self._rows:
            self._rows[q_owner] = list(_region_rows(self._mask, self._queries[q_owner]))
        if k_owner not in self._searches:
            self._searches[k_owner] = _KeySearch(self._keys[k_owner])
        return _visible_boxes(self._rows[q_owner], self._searches[k_owner])


class _RegionRows(NamedTuple):
    """The rows of a segment of queries that lie in a region, and the positions of the keys that they may see."""

    region: Region
    segment: Segment
    offset: int  # of the segment's first row in its block
    start: int
    stop: int
    first_key: int
    last_key: int


def _region_rows(mask: Mask, queries: Sequence[Segment]) -> Iterator[_RegionRows]:
    """The rows of a block of queries, once for each region in which they lie."""
    offset = 0
    for q in queries:
        first, last = q.start, q.last
        for region in mask.regions_of_rows(first, last + 1):
            start, stop = q.within(region.q_start, region.q_stop)
            keys = max(region.k_start, first - region.hi), min(region.k_stop - 1, last - region.lo)
            yield _RegionRows(region, q, offset, offset + start, offset + stop, *keys)
        offset += q.count


def _visible_boxes(rows: Iterable[_RegionRows], keys: _KeySearch) -> Iterator[Box]:
    """The boxes in which rows see a block of keys: at most one for each region and each segment of keys."""
    for some in rows:
        for k, k_offset in keys.between(some.first_key, some.last_key):
            if box := _visible_box(some, k, k_offset):
                yield box


class _KeySearch:
    """Finds the segments of a block of keys that may hold positions of a range; by bisection if there are many."""

    def __init__(self, keys: Sequence[Segment]) -> None:
        self._pairs = list(zip(keys, accumulate((k.count for k in keys), initial=0), strict=False))
        self._starts: list[int] = []
        if len(keys) > _SEARCHED:
            rising = sorted(self._pairs, key=lambda pair: pair[0].start)
            if all(a.last < b.start for (a, _), (b, _) in pairwise(rising)):
                self._pairs = rising
                self._starts, self._lasts = [k.start for k, _ in rising], [k.last for k, _ in rising]

    def between(self, first: int, last: int) -> Sequence[tuple[Segment, int]]:
        """Segments that may hold a position of [first, last], each with the local index of its first row."""
        if not self._starts:
            return self._pairs
        return self._pairs[bisect_left(self._lasts, first) : bisect_right(self._starts, last)]


def _visible_box(rows: _RegionRows, k: Segment, k_offset: int) -> Box | None:
    """The box in which rows of one region see one segment of keys; None if they see nothing of it."""
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
