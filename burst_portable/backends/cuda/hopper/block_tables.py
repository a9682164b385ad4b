"""Define the format of the launch tables of the Hopper kernels, and build those whose additions have any order.

`forward_table` is for the forward, `backward_table` for a backward that need not be deterministic. `ordered_tables` has
the tables whose additions to dQ have an order.

A launch table lists the inner blocks that each outer block visits: see `outer_blocks`. A table is one flat list of
int32::

    work    16 per outer block     outer start, offset of its runs, number of runs, number of full blocks,
                                   offset of its masked entries, number of masked entries, outer stop,
                                   offset of the turns of its runs, the 8 values of one masked entry
                                   (forward) or the number of masked blocks that are visited first and the
                                   first row of the gradients that are written (backward)
    runs    2 per run              first inner index, number of blocks; of an ordered table, this number is negative if
                                   the following blocks have decreasing indices
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
gradients. The runs contain all visited blocks in this order, masked ones too, except the entry in the work row.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from burst_portable.backends.cuda.hopper.outer_blocks import (
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
        turns: Of an ordered table, the turn of the first visit of each inner block, or `ordered_tables.NONE`. Empty for
            other tables. A turn is the number of the work row, plus the number of all work rows for each visit of this
            row before.
        cleared: Of an ordered table, [start, stop) of the inner indices that must be 0 before the launch.
        together: Of an ordered table, the largest part of the work rows that begin with one inner block. If their
            programs start at the same time, each waits for the previous one.
        follows: Whether a few long work rows of an ordered table come first, and the remaining ones begin where those
            have been.
        parts: Of an ordered table with divided outer blocks, each of them and its number of work rows. Empty for other
            tables.
    """

    numbers: list[int]
    blocks: int
    long: Span | None = None
    lengths: tuple[int, ...] = ()
    turns: tuple[int, ...] = ()
    cleared: tuple[Span, ...] = ()
    together: float = 0.0
    follows: bool = False
    parts: tuple[tuple[Span, int], ...] = ()

    @property
    def longest(self) -> int:
        """Maximum number of inner blocks per work row."""
        return max(self.lengths, default=0)

    @property
    def total(self) -> int:
        """Sum of the inner blocks of all work rows."""
        return sum(self.lengths)

    @property
    def visits_once(self) -> bool:
        """Whether the work rows of an ordered table visit no inner block twice."""
        return self.total == sum(turn >= 0 for turn in self.turns)


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


def _rotated(run: tuple[int, int], skip: int, inner: int) -> Iterator[tuple[int, int]]:
    """Yield a run in two parts: from block number `skip` to the end, then the beginning. Else the whole run."""
    start, count = run
    if 0 < skip < count:
        yield start + skip * inner, count - skip
        yield start, skip
    else:
        yield run


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
