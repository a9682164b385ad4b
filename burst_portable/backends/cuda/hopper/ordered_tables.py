"""Build the launch tables of deterministic backward passes, in which additions to dQ have an order.

The work rows that visit an inner block add to it in the order of the table (`block_tables` describes its format). So
inner blocks start at multiples of their size. They are counted from the first query or from the start of a long
document (`query_starts`). A run ends where the next visitor changes. The first visit of a block writes it. But blocks
at the border of two documents may have rows of both. A visit adds 0 to those of the other one, in no order. So these
blocks are cleared before the launch. `_order` returns the order in which programs wait least. If outer blocks are
divided (`divided_table`), each part writes separate gradients, in the order of the work rows. The outer stop is then
the end of these rows.
"""

from __future__ import annotations

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

_OUTLIER = 4  # times the median length of a group of an ordered table, which is not reversed for a longer block
NONE = -1  # turn after the last visit of an inner block
_LATER = -2  # turn after the last visit of a launch, if a later launch visits the inner block again


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
        every_block_of: See `block_tables.backward_table`.
        short: Number of inner blocks up to which an outer block is short. See `_order`.
        starts: See `query_starts`.
        excluded: See `block_tables.backward_table`.
        later: `LaunchTable.turns` of a launch after this one. Default: there is none.
    """
    collected, long = collect_key_blocks(tiles, rows, q_block, k_block, every_block_of, excluded, q_block, starts)
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
    least = LONG_DOCUMENT * q_block
    long = [at for at, end in zip(candidates, following, strict=True) if at >= 4 and end - at >= least]
    return (0, *(at - at % 4 for at in long))


@dataclass(frozen=True, slots=True)
class _Visit:
    """A run of inner blocks of one work row: its first inner index, and the numbers of its inner blocks."""

    start: int
    blocks: range


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
    table = pack(order, peel=False, visited=visited[::-1], written=written)
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


def _order(collected: dict[Span, OuterBlock], inner: int, short: int) -> tuple[list[tuple[Span, OuterBlock]], bool]:
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
    groups: list[list[tuple[Span, OuterBlock]]] = []
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
