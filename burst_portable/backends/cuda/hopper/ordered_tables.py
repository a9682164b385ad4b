"""Build the launch tables of deterministic backward passes, in which additions to dQ have an order.

The work rows that visit an inner block add to it in the order of the table (`block_tables` describes its format). So
inner blocks start at multiples of their size. They are counted from the first query or from the start of a long
document (`query_starts`). A run ends where the next visitor changes. Its count is negative if it goes down.
`order_rows` says which order lets programs wait least.

The first visit of a block writes it. But blocks at the border of two documents may have rows of both. A visit adds 0 to
those of the other one, in no order. So these blocks are cleared before the launch. If outer blocks are divided
(`divided_table`), each part writes separate gradients, in the order of the work rows. The outer stop is then the end of
these rows.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, groupby, pairwise

from burst_portable.backends.cuda.hopper.block_tables import LaunchTable, pack
from burst_portable.backends.cuda.hopper.outer_blocks import (
    LONG_DOCUMENT,
    OuterBlock,
    Span,
    collect_key_blocks,
    divide,
    part_length_of,
)
from burst_portable.planning.tiles import Tiles

_FEW = 8  # outer blocks that reach far come first if they are at most 1/_FEW of all
NONE = -1  # turn after the last visit of an inner block
_LATER = -2  # turn after the last visit of a launch, if a later launch visits the inner block again


def ordered_table(
    tiles: Tiles,
    rows: int,
    q_block: int,
    k_block: int,
    every_block_of: int = 0,
    *,
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
        every_block_of: See `block_tables.backward_table`.
        starts: See `query_starts`.
        excluded: See `block_tables.backward_table`.
        later: `LaunchTable.turns` of a launch after this one. Default: there is none.
    """
    collected, long = collect_key_blocks(tiles, rows, q_block, k_block, every_block_of, excluded, q_block, starts)
    return replace(_pack_ordered(order_rows(collected, q_block), rows, q_block, starts, later=later), long=long)


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
        fill: See `block_tables.backward_table`.
        starts: See `query_starts`.
        earlier: `LaunchTable.turns` of a launch before this one. Default: there is none.
    """
    collected, _ = collect_key_blocks(tiles, rows, q_block, k_block, 0, None, q_block, starts)
    most = part_length_of(collected, fill)
    order, parts = [], []
    for span, block in sorted(collected.items(), key=lambda item: item[0]):
        block.sort()
        made = list(divide(block, most, q_block))
        order += [(span, part) for part in made]
        parts.append((span, len(made)))
    written = [(k_block * i, k_block * (i + 1)) for i in range(len(order))]
    return replace(_pack_ordered(order, rows, q_block, starts, written, earlier=earlier), parts=tuple(parts))


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
    least = LONG_DOCUMENT * q_block
    long = [at for at, end in zip(candidates, following, strict=True) if at >= 4 and end - at >= least]
    return (0, *(at - at % 4 for at in long))


def align_queries(tiles: Tiles, rows: int, q_block: int, k_block: int) -> tuple[Tiles, tuple[int, ...]]:
    """Return tiles, and the starts of blocks of queries (`query_starts`), so that few blocks are visited.

    The keys of a tile with most pairs may start within a block, as those after attention sinks. If blocks of queries
    start there too, each block of keys visits one block less of a window. The tiles are then divided there.
    """
    starts = query_starts(tiles, rows, q_block)
    largest = max(tiles, key=lambda tile: tile.num_pairs, default=None)
    if len(starts) > 1 or largest is None or 2 * largest.num_pairs < tiles.num_pairs:
        return tiles, starts
    at = max(largest.q_start, largest.k_start + largest.lo) % q_block
    at -= at % 4
    if not 0 < at < rows:
        return tiles, starts
    n_keys = max(tile.k_stop for tile in tiles)
    parts = (tile.clipped(*queries, 0, n_keys) for tile in tiles for queries in ((0, at), (at, rows)))
    divided = Tiles(part for part in parts if part is not None)

    def visits(tiles: Tiles, starts: Sequence[int]) -> int:
        collected, _ = collect_key_blocks(tiles, rows, q_block, k_block, 0, None, q_block, starts)
        return sum(block.length for block in collected.values())

    return (divided, (0, at)) if visits(divided, (0, at)) < visits(tiles, starts) else (tiles, starts)


@dataclass(frozen=True, slots=True)
class _Visit:
    """A run of inner blocks of one work row: its lowest inner index, and the numbers of its inner blocks."""

    start: int
    blocks: range

    def part(self, blocks: range, inner: int) -> _Visit:
        """Return the visit of a part of its blocks."""
        return _Visit(self.start + (blocks.start - self.blocks.start) * inner, blocks)


def _pack_ordered(
    order: Sequence[tuple[Span, OuterBlock]],
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
    walks: list[list[tuple[_Visit, int, int]]] = []  # visit, turn, 1 if it may write the blocks
    for number, (_, block) in enumerate(order):
        walks.append([])
        for visit, repeat in _repeats(_joined(block, inner, starts, numbers), inner, falls=block.falls):
            for part, begins in _equal_parts(fresh, visit.blocks, falls=block.falls):
                walks[-1].append((visit.part(part, inner), number + repeat * len(order), begins))
            fresh[visit.blocks.start : visit.blocks.stop] = bytes(len(visit.blocks))
    following = [NONE if turn == NONE else _LATER for turn in later] or [NONE] * inner_blocks
    turns = [NONE] * inner_blocks
    visited: list[list[tuple[int, ...]]] = []
    for (_, block), walk in zip(reversed(order), reversed(walks), strict=True):
        pieces: list[tuple[int, ...]] = []
        for visit, turn, begins in reversed(walk):
            blocks = visit.blocks
            pieces[:0] = [
                (*_entry(visit.part(part, inner), inner, falls=block.falls), turn, next_turn, begins)
                for part, next_turn in _equal_parts(following, blocks, falls=block.falls)
            ]
            same = [turn] * len(blocks)
            following[blocks.start : blocks.stop] = turns[blocks.start : blocks.stop] = same
        visited.append(pieces)
    first_blocks = Counter(pieces[0][2] for pieces in visited if pieces)
    together = max(first_blocks.values(), default=0) / max(1, len(order))
    follows = len({block.falls for _, block in order}) == 2
    table = pack(order, peel=False, visited=visited[::-1], written=written)
    cleared = _cleared(turns, earlier, shared, inner, starts, stops, numbers)
    return replace(table, turns=tuple(turns), cleared=cleared, together=together, follows=follows)


def _entry(visit: _Visit, inner: int, *, falls: bool) -> tuple[int, int, int]:
    """Return the first inner index, the signed count and the number of the first inner block of a visit."""
    count = len(visit.blocks)
    if falls:
        return visit.start + (count - 1) * inner, -count, visit.blocks[-1]
    return visit.start, count, visit.blocks[0]


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


def _joined(block: OuterBlock, inner: int, starts: Sequence[int], numbers: Sequence[int]) -> list[_Visit]:
    """Return the runs of an outer block in the order of its visits. Those that follow each other are joined."""
    made: list[_Visit] = []
    visits = block.walked()
    for start, count in reversed(visits) if block.falls else visits:
        at = bisect_right(starts, start) - 1
        first = numbers[at] + (start - starts[at]) // inner
        if made and start == made[-1].start + len(made[-1].blocks) * inner and first == made[-1].blocks.stop:
            made[-1] = _Visit(made[-1].start, range(made[-1].blocks.start, first + count))
        else:
            made.append(_Visit(start, range(first, first + count)))
    return made[::-1] if block.falls else made


def _repeats(visits: list[_Visit], inner: int, *, falls: bool) -> Iterator[tuple[_Visit, int]]:
    """Yield the runs of one work row, and how often the row has visited their blocks before.

    A row visits a block once for each tile of it.
    """
    ordered = sorted(visits, key=lambda visit: visit.blocks.start)
    if all(visit.blocks.stop <= following.blocks.start for visit, following in pairwise(ordered)):
        yield from ((visit, 0) for visit in visits)
        return
    seen: Counter[int] = Counter()
    for visit in visits:
        for number in reversed(visit.blocks) if falls else visit.blocks:
            yield visit.part(range(number, number + 1), inner), seen[number]
            seen[number] += 1


def order_rows(collected: dict[Span, OuterBlock], inner: int) -> list[tuple[Span, OuterBlock]]:
    """Return the outer blocks of an ordered table in the order in which programs wait least: long ones first.

    Outer blocks of equal lengths have increasing indices. An outer block visits inner blocks by decreasing index. So
    those of a causal document begin with the same inner block, one after the other, and then never wait. Those of a
    window begin with inner blocks that no other has visited, and follow the outer block before them at a distance.

    A few outer blocks may reach farther than later ones, as that of attention sinks. They come first. All others then
    have decreasing indices and visit inner blocks by increasing index. So each needs only that the far ones have come
    down to its first inner block.
    """
    blocks = sorted(collected.items(), key=lambda item: item[0])
    nearest: float = math.inf  # the lowest of the inner indices that later outer blocks reach
    far: list[tuple[Span, OuterBlock]] = []
    for item in reversed(blocks):
        item[1].sort(falls=True)
        if visits := item[1].walked():
            reached = max(start + (count - 1) * inner for start, count in visits)
            if reached > nearest:
                far.append(item)
            nearest = min(nearest, reached)
    if not 0 < _FEW * len(far) <= len(blocks):
        return sorted(blocks, key=lambda item: -item[1].length)
    far.reverse()
    spans = {span for span, _ in far}
    others = [item for item in reversed(blocks) if item[0] not in spans]
    for _, block in others:
        block.sort()
    return far + others


def _equal_parts(values: Sequence[int], where: range, *, falls: bool) -> list[tuple[range, int]]:
    """Return the longest parts of `where` with one value of `values`, and this value; last first if `falls`."""
    parts, at = [], where.start
    for value, equal in groupby(values[where.start : where.stop]):
        stop = at + len(list(equal))
        parts.append((range(at, stop), value))
        at = stop
    return parts[::-1] if falls else parts
