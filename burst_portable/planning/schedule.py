"""What a rank does in a pass, step by step: computations, and the moves around them. See `plans`."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from burst_portable.planning.routes import Move
from burst_portable.planning.tiles import Tiles, covered


class BlockTiles(NamedTuple):
    """The tiles of one pair of blocks, and where the pair's first row and column lie in a `Compute`."""

    tiles: Tiles
    row: int
    column: int


@dataclass(frozen=True)
class Compute:
    """One call of `Kernel`: a rank's own block of one side with one or several blocks of the other.

    Several blocks lie one after the other in memory, in the order of their owners here: the rank's own is the last.
    Where heads are divided, a block holds the rows of all ranks that divide them, for one group of this rank's heads.
    """

    q_owners: tuple[int, ...]
    k_owners: tuple[int, ...]
    blocks: tuple[BlockTiles, ...]

    @property
    def pairs(self) -> tuple[tuple[int, int], ...]:
        """(owner of queries, owner of keys)."""
        return tuple((q, k) for q in self.q_owners for k in self.k_owners)

    @property
    def label(self) -> str:
        """Its name in traces and printed plans: q1 x kv0, or q1 x kv0+3 for several.

        Under ulysses there is one, which means all tokens of the sequence, for a group of this rank's heads.
        """
        q, k = ("+".join(map(str, owners)) for owners in (self.q_owners, self.k_owners))
        return f"q{q} x kv{k}"

    @cached_property
    def tiles(self) -> Tiles:
        """The tiles of all its pairs; rows and columns are counted from the first block of each side."""
        return Tiles(
            tile.shifted(row, column) if row or column else tile for tiles, row, column in self.blocks for tile in tiles
        )

    # The properties below do without `tiles`: most plans are only priced, and shifting tiles would dominate that.

    @property
    def count(self) -> int:
        """How many tiles it has."""
        return sum([len(tiles) for tiles, _, _ in self.blocks])

    @property
    def num_pairs(self) -> int:
        """(q, k) pairs of one head."""
        return sum([tiles.num_pairs for tiles, _, _ in self.blocks])

    @property
    def heights(self) -> tuple[int, int]:
        """(rows of all its tiles together, rows of the tallest one); a row in several tiles counts in each."""
        every = [tiles.heights for tiles, _, _ in self.blocks]
        return sum([rows for rows, _ in every]), max([tallest for _, tallest in every])

    @property
    def columns(self) -> int:
        """Columns of all its tiles together; a column in several tiles counts in each."""
        return sum([tiles.columns for tiles, _, _ in self.blocks])

    @property
    def covered(self) -> tuple[int, int]:
        """(rows, columns) that are in any of its tiles, each counted once."""
        if len(self.blocks) == 1:
            return self.blocks[0].tiles.covered
        rows = [(t.q_start + row, t.q_stop + row) for tiles, row, _ in self.blocks for t in tiles]
        columns = [(t.k_start + column, t.k_stop + column) for tiles, _, column in self.blocks for t in tiles]
        return covered(rows), covered(columns)

    def visited(self, block: int) -> int:
        """Pairs of the blocks that a kernel computes: see `Tile.visited`."""
        return sum([tiles.visited(block, row) for tiles, row, _ in self.blocks])


@dataclass(frozen=True, slots=True)
class Step:
    """What a rank does at one step, in this order.

    1. wait for `arrivals`; 2. post `sends` and `receives`; 3. compute with what came, in one call of the kernel;
    4. wait for `result_arrivals` and add them; 5. post `result_sends` and `result_receives`; 6. let go of blocks that
    no later step uses.
    """

    index: int
    arrivals: tuple[Move, ...] = ()
    sends: tuple[Move, ...] = ()
    receives: tuple[Move, ...] = ()
    compute: Compute | None = None
    result_arrivals: tuple[Move, ...] = ()
    result_sends: tuple[Move, ...] = ()
    result_receives: tuple[Move, ...] = ()
    released: tuple[int, ...] = ()

    @property
    def joins_local(self) -> bool:
        """Whether it computes with the rank's own block together with blocks that arrive: after them, in one launch."""
        return self.compute is not None and len(self.compute.blocks) > len(self.arrivals) > 0

    @property
    def has_moves(self) -> bool:
        """Whether it waits for, sends or receives anything."""
        return bool(
            self.arrivals
            or self.sends
            or self.receives
            or self.result_arrivals
            or self.result_sends
            or self.result_receives
        )


Steps = tuple[Step, ...]
_ROWS = 128  # what most kernels compute at once: a launch is cut where such a block begins
ROWS_WORTH_A_LAUNCH = (
    4096  # rows: writing so many wide and rounding them takes as long as a launch, with 32 heads of 128
)
_MOVES = ("arrivals", "sends", "receives", "result_arrivals", "result_sends", "result_receives")
"""The fields of a `Step` that hold moves."""


def renamed(step: Step, stride: int, place: int) -> Step:
    """A step of a ring's member, with members replaced by ranks: member m is the rank m * stride + place."""

    def rank(member: int) -> int:
        return member * stride + place

    def ranks(members: Iterable[int]) -> tuple[int, ...]:
        return tuple(map(rank, members))

    def named(moves: Iterable[Move]) -> tuple[Move, ...]:
        return tuple(m._replace(owner=rank(m.owner), source=rank(m.source), target=rank(m.target)) for m in moves)

    c = step.compute
    return Step(
        step.index,
        arrivals=named(step.arrivals),
        sends=named(step.sends),
        receives=named(step.receives),
        compute=c and Compute(ranks(c.q_owners), ranks(c.k_owners), c.blocks),
        result_arrivals=named(step.result_arrivals),
        result_sends=named(step.result_sends),
        result_receives=named(step.result_receives),
        released=ranks(step.released),
    )


def divided(compute: Compute, share: float) -> tuple[Compute, Compute] | None:
    """A launch of one pair of blocks as two: the upper rows, with about that share of its pairs, and the rest.

    None if the share is 0 or 1, or if there are too few rows to cut.
    """
    (block,) = compute.blocks
    if not 0 < share < 1 or (row := _cut(block.tiles, share)) is None:
        return None
    top, bottom, left, right = block.tiles.box
    upper, lower = (
        Tiles(part for tile in block.tiles if (part := tile.clipped(*rows, left, right)))
        for rows in ((top, row), (row, bottom))
    )
    first, rest = (replace(compute, blocks=(block._replace(tiles=tiles),)) for tiles in (upper, lower))
    return first, rest


def _cut(tiles: Tiles, share: float) -> int | None:
    """The row above which about that share of all pairs lies; preferably one where a tile begins.

    Tiles then stay whole: some kernels need more calls for the parts of a tile that was cut.
    """
    top, bottom, left, right = tiles.box

    def above(row: int) -> float:
        parts = (tile.clipped(top, row, left, right) for tile in tiles)
        return sum(part.num_pairs for part in parts if part) / tiles.num_pairs

    edges = [row for row in {tile.q_start for tile in tiles} if share / 2 <= above(row) <= min(2 * share, 0.9)]
    if edges:
        return min(edges, key=lambda row: (abs(above(row) - share), row))
    rows = range((top // _ROWS + 1) * _ROWS, bottom, _ROWS)
    found = bisect_left(rows, share, key=above)
    return rows[min(found, len(rows) - 1)] if rows else None


def merged_rows(steps: Steps, rows: int) -> tuple[int, int] | None:
    """[start, stop) of the queries that are merged over several computations; None where that is most of them, or none.

    ::

        a window over two ranks, rank 1     own keys     keys of rank 0
            rows 0 to 4095                    part            part         merged
            rows 4096 to 65535                all                          final after the first computation
    """
    computes = [step.compute for step in steps if step.compute]
    boxes = [(block.row, block.tiles.box) for compute in computes[1:] for block in compute.blocks]
    if not boxes:
        return None
    start, stop = min(row + box[0] for row, box in boxes), max(row + box[1] for row, box in boxes)
    start, stop = start // _ROWS * _ROWS, min(rows, -(-stop // _ROWS) * _ROWS)
    return (start, stop) if rows - (stop - start) >= max(ROWS_WORTH_A_LAUNCH, rows // 2) else None


def _ordered(moves: Iterable[Move]) -> tuple[Move, ...]:
    """Sorted, so that both ends of every pair of ranks post their moves in the same order."""
    ordered = list(moves)
    if len(ordered) > 1:
        ordered.sort(key=lambda m: (m.needed, m.side, m.owner, m.source, m.target))
    return tuple(ordered)


def scheduled(rank: int, inputs: list[Move], computes: dict[int, Compute], results: list[Move]) -> Steps:
    """Moves and computations, sorted into steps: one `Step` for every index at which anything happens."""
    at: dict[str, dict[int, list[Move]]] = {name: defaultdict(list) for name in _MOVES}
    last_use: dict[int, int] = {}
    for move in inputs:
        if move.target == rank:
            at["receives"][move.issue].append(move)
            at["arrivals"][move.needed].append(move)
            last_use[move.owner] = max(last_use.get(move.owner, 0), move.needed)
        else:
            at["sends"][move.issue].append(move)
            if move.owner != rank:
                last_use[move.owner] = max(last_use.get(move.owner, 0), move.issue)
    for move in results:
        if move.target == rank:
            at["result_receives"][move.issue].append(move)
            at["result_arrivals"][move.needed].append(move)
        else:
            at["result_sends"][move.issue].append(move)
    released = defaultdict(list)
    for owner, step in last_use.items():
        released[step].append(owner)
    indices = sorted({*computes, *released, *(step for slot in at.values() for step in slot)})
    return tuple(
        Step(
            index,
            compute=computes.get(index),
            released=tuple(sorted(released.get(index, ()))),
            **{name: _ordered(slot[index]) for name, slot in at.items() if index in slot},
        )
        for index in indices
    )
