"""Build the launch tables of the Hopper kernels from tiles.

`forward_table` is for the forward. In the backward, additions to dQ have any order (`backward_table`) or the order of
the table (`ordered_table`, and `divided_table` for few keys that very many queries see).

A launch table lists the inner blocks that each outer block visits: see `outer_blocks`. A table is one flat list of
int32::

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

In an ordered table, the work rows that visit an inner block add to it in the order of the table. So inner blocks start
at multiples of their size. They are counted from the first query or from the start of a long document
(`query_starts`). A run ends where the next visitor changes. The first visit of a block writes it. But blocks at the
border of two documents may have rows of both. A visit adds 0 to those of the other one, in no order. So these blocks
are cleared before the launch. `_order` says which order lets programs wait least. If outer blocks are divided, each
part writes separate gradients, in the order of the work rows. The outer stop is then the end of these rows.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, groupby, pairwise

from burst_portable.backends.cuda.hopper.outer_blocks import (
    LONG_DOCUMENT,
    OuterBlock,
    Span,
    collect_blocks,
    collect_key_blocks,
    divide,
    find_spans,
    length_limit,
    part_length_of,
)
from burst_portable.planning.tiles import Tiles

_WORK = 16  # int32 values per work row
_HIDDEN = (0, 0, 0, 0, 0, 0, 0, 0)  # entry of a masked block without visible pairs
_OUTLIER = 4  # times the median length of a group of an ordered table, which is not reversed for a longer block
NONE = -1  # turn after the last visit of an inner block
_LATER = -2  # turn after the last visit of a launch, if a later launch visits the inner block again

# Query blocks of one head that run at the same time. Each starts 1 MiB of K and V after the previous one.
ABREAST = 32


@dataclass(frozen=True, slots=True)
class LaunchTable:
    """One launch table in host memory.

    Attributes:
        numbers: The int32 values of the table.
        blocks: Work rows, which is the number of outer blocks (or parts of them) that are launched per head.
        long: Outer indices from the first to the last block that visits more inner blocks than `length_limit`; None
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
    spans = find_spans(tiles, rows, q_block)
    blocks = collect_blocks(tiles, spans, q_block, k_block)
    if every_block:
        for span in spans:
            blocks.setdefault(span, OuterBlock(masked=[_HIDDEN]))
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
    return pack(blocks.items(), peel=True)


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
            Default: into parts of at most `length_limit` inner blocks.
    """
    collected, long = collect_key_blocks(tiles, rows, q_block, k_block, every_block_of, excluded)
    most = part_length_of(collected, fill) if fill else length_limit(collected)
    blocks = []
    for span, block in collected.items():
        # Each run starts at the block's own index. Otherwise, programs that run at the same time would add to the same
        # rows of dq at the same time.
        block.runs = [part for run in block.runs for part in _rotated(run, (span[0] - run[0]) // q_block, q_block)]
        parts = [block] if every_block_of else divide(block, most, q_block)
        blocks += [(span, part) for part in parts]
    return pack(blocks, peel=False, long=long)


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
        fill: See `backward_table`.
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


def pack(
    blocks: Iterable[tuple[Span, OuterBlock]],
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


def _walked(block: OuterBlock, *, peel: bool) -> list[tuple[int, ...]]:
    """Return (first inner index, number of blocks) of the runs of an outer block, in the order of its visits."""
    return [*block.runs, *((entry[0], 1) for entry in block.masked[1:])] if peel else [*block.walked()]
