"""Define `Step`, what a rank does at one step of a pass, and sort moves and computations into steps. See `plans`."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from burst_portable.planning.routes import Move, Side
from burst_portable.planning.tiles import Positions, Tiles, covered


class BlockTiles(NamedTuple):
    """The tiles of one pair of blocks, and the offsets of the pair's rows and columns in a `Compute`."""

    tiles: Tiles
    row: int
    column: int


@dataclass(frozen=True)
class Compute:
    """One kernel launch: the local block of one side with one or several blocks of the other.

    Several blocks are contiguous in memory, in the order of the owners here; the local block is the last. If heads are
    divided, a block has the rows of all ranks that divide them, for one group of this rank's heads. `positions`: see
    `Tiles`.
    """

    q_owners: tuple[int, ...]
    k_owners: tuple[int, ...]
    blocks: tuple[BlockTiles, ...]
    positions: tuple[Positions, Positions] | None = None

    @property
    def pairs(self) -> tuple[tuple[int, int], ...]:
        """(owner of the queries, owner of the keys) of each pair of blocks."""
        return tuple((q, k) for q in self.q_owners for k in self.k_owners)

    @property
    def label(self) -> str:
        """The name in traces and printed plans: q1 x kv0, or q1 x kv0+3 for several blocks.

        Under ulysses the only block has all tokens of the sequence, for a group of this rank's heads.
        """
        q, k = ("+".join(map(str, owners)) for owners in (self.q_owners, self.k_owners))
        return f"q{q} x kv{k}"

    @cached_property
    def tiles(self) -> Tiles:
        """The tiles of all pairs of blocks. Rows and columns count from the first block of each side."""
        return Tiles(
            (
                tile.shifted(row, column) if row or column else tile
                for tiles, row, column in self.blocks
                for tile in tiles
            ),
            self.positions,
        )

    # The properties below do not use `tiles`: for most plans only the cost is estimated, and shifting tiles would
    # dominate that.

    @property
    def count(self) -> int:
        """Number of tiles."""
        return sum([len(tiles) for tiles, _, _ in self.blocks])

    @property
    def num_pairs(self) -> int:
        """Visible (query, key) pairs per head."""
        return sum([tiles.num_pairs for tiles, _, _ in self.blocks])

    @property
    def heights(self) -> tuple[int, int]:
        """(rows of all tiles, rows of the tallest tile). A row in several tiles counts once per tile."""
        every = [tiles.heights for tiles, _, _ in self.blocks]
        return sum([rows for rows, _ in every]), max([tallest for _, tallest in every])

    @property
    def columns(self) -> int:
        """Columns of all tiles. A column in several tiles counts once per tile."""
        return sum([tiles.columns for tiles, _, _ in self.blocks])

    @property
    def covered(self) -> tuple[int, int]:
        """(rows, columns) that are in at least one tile, each counted once."""
        if len(self.blocks) == 1:
            return self.blocks[0].tiles.covered
        rows = [(t.q_start + row, t.q_stop + row) for tiles, row, _ in self.blocks for t in tiles]
        columns = [(t.k_start + column, t.k_stop + column) for tiles, _, column in self.blocks for t in tiles]
        return covered(rows), covered(columns)

    def visited(self, block: int) -> int:
        """Return the pairs in the kernel blocks of this size that are computed: see `Tile.visited`."""
        return sum([tiles.visited(block, row) for tiles, row, _ in self.blocks])


@dataclass(frozen=True, slots=True)
class Step:
    """The work of a rank at one step, in this order.

    1. Wait for `arrivals`.
    2. Post `sends` and `receives`.
    3. Compute with the blocks that arrived, in one launch.
    4. Wait for `result_arrivals`: add gradients, or in the forward pass merge partial results (out, LSE).
    5. Post `result_sends` and `result_receives`.
    6. Release the blocks of the owners `released`, which no later step uses.
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
        """Return whether one launch computes with blocks that arrived and, behind them, the local block."""
        return self.compute is not None and len(self.compute.blocks) > len(self.arrivals) > 0

    @property
    def side(self) -> Side | None:
        """The side of the remote blocks with which a step computes; None if it computes with the local block alone."""
        return self.arrivals[0].side if self.arrivals else None

    @property
    def has_moves(self) -> bool:
        """Return whether the rank waits for, sends or receives a message."""
        return any(getattr(self, name) for name in _MOVES)


Steps = tuple[Step, ...]
_ROWS = 128  # rows per block of most kernels: a launch is split where a block begins
ROWS_WORTH_A_LAUNCH = 4096
"""Rows that take as long as a launch to write in the accumulation dtype and round, with 32 heads of 128."""
_MOVES = ("arrivals", "sends", "receives", "result_arrivals", "result_sends", "result_receives")
"""The fields of a `Step` that hold moves."""


def rename_members(step: Step, stride: int, offset: int) -> Step:
    """Return a step with the members of a ring replaced by ranks: member m is rank m * stride + offset."""

    def rank(member: int) -> int:
        return member * stride + offset

    def ranks(members: Iterable[int]) -> tuple[int, ...]:
        return tuple(map(rank, members))

    def rename(moves: Iterable[Move]) -> tuple[Move, ...]:
        return tuple(m._replace(owner=rank(m.owner), source=rank(m.source), target=rank(m.target)) for m in moves)

    c = step.compute
    return Step(
        step.index,
        compute=c and replace(c, q_owners=ranks(c.q_owners), k_owners=ranks(c.k_owners)),
        released=ranks(step.released),
        **{name: rename(getattr(step, name)) for name in _MOVES},
    )


def split_compute(compute: Compute, share: float) -> tuple[Compute, Compute] | None:
    """Split a launch of one pair of blocks into its upper rows, with about this share of its pairs, and the rest.

    Return None if the share is 0 or 1, or if there are too few rows to split.
    """
    (block,) = compute.blocks
    if not 0 < share < 1 or (row := _split_row(block.tiles, share)) is None:
        return None
    top, bottom, left, right = block.tiles.box
    upper, lower = (
        Tiles(part for tile in block.tiles if (part := tile.clipped(*rows, left, right)))
        for rows in ((top, row), (row, bottom))
    )
    first, rest = (replace(compute, blocks=(block._replace(tiles=tiles),)) for tiles in (upper, lower))
    return first, rest


def _split_row(tiles: Tiles, share: float) -> int | None:
    """Return the row above which about this share of all pairs lies; preferably the first row of a tile.

    Tiles then stay complete: some kernels need more calls for the parts of a split tile.
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
    """Return [start, stop) of the queries that several computations merge into; None if these are none or most rows.

    ::

        a window over two ranks, rank 1     local keys   keys of rank 0
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


def interleave_groups(steps: Steps, groups: int) -> Iterator[tuple[int, Step]]:
    """Yield (group, step) in the order in which a rank runs the steps of its groups of heads.

    Each group runs all steps, one step later than the group before it. So its blocks arrive while that group computes::

        step 0 of group 0: sends                      at most two groups are in memory, if a block is used one step
        step 0 of group 1: sends                      after it is sent
        step 1 of group 0: computes
        step 0 of group 2: sends
        step 1 of group 1: computes

    All ranks post the messages of groups in this order.
    """
    if groups == 1:
        yield from ((0, step) for step in steps)
        return
    times = ((group + step.index, step.index, i, group) for i, step in enumerate(steps) for group in range(groups))
    for _, _, i, group in sorted(times):
        yield group, steps[i]


def in_order(moves: Iterable[Move]) -> tuple[Move, ...]:
    """Sort moves, so that both ends of every pair of ranks post them in the same order."""
    return tuple(sorted(moves, key=lambda m: (m.wait_step, m.side, m.owner, m.source, m.target)))


def make_steps(rank: int, moves: Iterable[Move], computes: dict[int, Compute]) -> Steps:
    """Sort moves and computations into steps: one `Step` for every index at which anything happens."""
    at: dict[str, dict[int, list[Move]]] = {name: defaultdict(list) for name in _MOVES}
    last_use: dict[int, int] = {}
    for move in moves:
        kind, received = "result_" if move.is_result else "", move.target == rank
        at[f"{kind}receives" if received else f"{kind}sends"][move.post_step].append(move)
        if received:
            at[f"{kind}arrivals"][move.wait_step].append(move)
        if not move.is_result and (received or move.owner != rank):
            step = move.wait_step if received else move.post_step
            last_use[move.owner] = max(last_use.get(move.owner, 0), step)
    released = defaultdict(list)
    for owner, step in last_use.items():
        released[step].append(owner)
    indices = sorted({*computes, *released, *(step for slot in at.values() for step in slot)})
    return tuple(
        Step(
            index,
            compute=computes.get(index),
            released=tuple(sorted(released.get(index, ()))),
            **{name: in_order(slot[index]) for name, slot in at.items() if index in slot},
        )
        for index in indices
    )
