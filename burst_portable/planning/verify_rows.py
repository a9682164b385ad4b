"""Check the rows of every message of a rank: those that its receiver needs, and those that its launches read.

The executor takes the size of a message from `Move.rows`, and the place of a block in a launch from `Compute`. If they
disagree, a kernel reads rows that never arrived. The tiles of a launch must be those of the mask, and its positions,
by which dropout chooses weights, those of its rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import pairwise

from burst_portable.layout import cut
from burst_portable.planning.plans import PassPlan, block_pairs, needed_rows
from burst_portable.planning.routes import Move, Rows, Side, count_rows
from burst_portable.planning.schedule import Compute, Step
from burst_portable.planning.tiles import Positions, Tiles


def wrong_rows(pass_plan: PassPlan, rank: int) -> Iterator[str]:
    """Yield the errors in the rows that one rank sends, forwards, computes with and returns in a pass."""
    rows = _Rows(pass_plan, rank)
    for step in pass_plan.steps_of(rank):
        rows.received |= {move.owner: move.rows for move in step.arrivals}
        for move in step.sends:
            yield from rows.check_block(move, step.index)
        if step.compute is not None:
            yield from rows.check_launch(step, step.compute)
        for move in (*step.result_arrivals, *step.result_sends):
            yield from rows.check_result(move, step.index)
    yield from rows.check_local_tiles()


class _Rows:
    """The rows of blocks on one rank. `received` has those of each remote block that arrived, by owner."""

    def __init__(self, pass_plan: PassPlan, rank: int) -> None:
        self._plan, self._rank, self._call = pass_plan, rank, pass_plan.call
        self._pairs = block_pairs(self._call.mask, self._call.layout, self._call.k_layout)
        self.received: dict[int, Rows] = {}
        self._local_parts: list[tuple[Tiles, str]] = []  # tiles of the local block, each with its launch

    def check_block(self, move: Move, index: int) -> Iterator[str]:
        """Yield the error in the rows of a block that this rank sends or forwards."""
        sends = f"rank {self._rank} sends {move.label} to rank {move.target} at step {index} with {_text(move.rows)}"
        received = self.received.get(move.owner)
        if move.owner != self._rank and received is not None and move.rows != received:
            yield f"{sends}, but received {_text(received)}; a route that forwards blocks must not have `trims`"
            return
        if move.owner != self._rank and self._plan.route.trims:
            yield f"{sends}, but is not its owner; a route that forwards blocks must not have `trims`"
            return
        needed, why = self._needed(move.side, move.owner, move.target)
        if move.rows != needed:
            yield f"{sends}, but {why} {_text(needed)}; see `trims` of the route"

    def _needed(self, side: Side, owner: int, target: int) -> tuple[Rows, str]:
        """Return the rows that a rank must receive of a block, and the beginning of a sentence that says why."""
        count = self._count(side, owner)
        tiles = self._pairs.tiles(*self._pair(side, owner, target)) if self._plan.trims else None
        if not tiles:  # also if the block is not needed: the caller checks that
            return ((0, count),), "the block has"
        return needed_rows(tiles, side, count), f"the tiles of rank {target} need"

    def check_launch(self, step: Step, compute: Compute) -> Iterator[str]:
        """Yield the errors in the places of blocks in a launch: they must be those of the rows that arrived."""
        side = step.side or self._plan.side
        owners = compute.k_owners if side == "kv" else compute.q_owners
        launch = f"rank {self._rank} computes {compute.label} at step {step.index}"
        local_count = self._count("q" if side == "kv" else "kv", self._rank)
        offset = 0
        for owner, (tiles, row, column) in zip(owners, compute.blocks, strict=False):
            rows = self.received.get(owner) if owner != self._rank else ((0, self._count(side, owner)),)
            if rows is None:
                return  # the caller reports that it never arrived
            if not tiles:
                yield f"{launch} without tiles of block {owner}"
                offset += count_rows(rows)
                continue
            across, along = (row, column) if side == "kv" else (column, row)
            top, bottom, left, right = tiles.box
            read, local = ((left, right), (top, bottom)) if side == "kv" else ((top, bottom), (left, right))
            first, past = read[0] + along, read[1] + along
            if across or local[0] < 0 or local[1] > local_count:
                found = (local[0] + across, local[1] + across)
                yield f"{launch} with rows {list(found)} of its local block, which has {local_count:,} rows"
            if first < offset or past > offset + count_rows(rows):
                arrived = f"block {owner} is at rows [{offset}, {offset + count_rows(rows)}) of the launch"
                yield f"{launch} with rows [{first}, {past}) for block {owner}, but {arrived}: {_text(rows)} of it"
            elif owner != self._rank:
                packed = self._pairs.tiles(*self._pair(side, owner, self._rank)).packed(rows, is_columns=side == "kv")
                shift = (0, offset) if side == "kv" else (offset, 0)
                if [t.shifted(row, column) for t in tiles] != [t.shifted(*shift) for t in packed]:
                    yield f"{launch} with other tiles of block {owner} than the mask has in {_text(rows)}"
            else:
                back = (0, -offset) if side == "kv" else (-offset, 0)
                self._local_parts.append((Tiles(t.shifted(row + back[0], column + back[1]) for t in tiles), launch))
            offset += count_rows(rows)
        if self._call.dropout is not None and compute.positions != self._positions(side, owners):
            yield f"{launch} with other positions than those of its rows, so dropout would drop other weights"

    def _positions(self, side: Side, owners: Iterable[int]) -> tuple[Positions, Positions]:
        """Return the global positions of the queries and of the keys of a launch."""
        q_layout, k_layout, local = self._call.layout, self._call.k_layout, self._plan.member(self._rank)
        layout = k_layout if side == "kv" else q_layout
        sent = Positions(
            segment
            for owner in owners
            for start, stop in self.received.get(owner, ((0, self._count(side, owner)),))
            for segment in cut(layout.shards[self._plan.member(owner)], start, stop)
        )
        if side == "kv":
            return Positions(q_layout.shards[local]), sent
        return sent, Positions(k_layout.shards[local])

    def check_local_tiles(self) -> Iterator[str]:
        """Yield the launches whose tiles of the local block differ from those of the mask, in their range of rows."""
        parts = sorted(self._local_parts, key=lambda part: part[0].box[0])
        of_mask = self._pairs.tiles(*self._pair(self._plan.side, self._rank, self._rank))
        if any(above.box[1] > below.box[0] for (above, _), (below, _) in pairwise(parts)):
            return  # the caller reports rows that are computed twice
        starts = [tiles.box[0] for tiles, _ in parts[1:]]
        limits = pairwise((0, *starts, self._count("q", self._rank)))
        for (tiles, launch), (start, stop) in zip(parts, limits, strict=False):
            clipped = (tile.clipped(start, stop, tile.k_start, tile.k_stop) for tile in of_mask)
            if list(tiles) != [tile for tile in clipped if tile]:
                where = f" in rows [{start}, {stop})" if starts else ""
                yield f"{launch} with other tiles of its local block than the mask has{where}; see `local_first_share`"

    def check_result(self, move: Move, index: int) -> Iterator[str]:
        """Yield the error in the rows of gradients, or of results of a helper, that this rank sends or adds."""
        if move.owner == self._rank:
            if not _fits(move.rows, count := self._count(move.side, move.owner)):
                adds = f"rank {self._rank} adds {move.label} of rank {move.source} at step {index}"
                yield f"{adds} with {_text(move.rows)}, but the block has {count:,} rows"
            return
        received = self.received.get(move.owner)
        if received is not None and move.rows != received:
            what = f"sends {move.label} to rank {move.target}"
            if move.target == self._rank:
                what = f"adds {move.label} of rank {move.source}"
            yield (
                f"rank {self._rank} {what} at step {index} with {_text(move.rows)}, but computed with "
                f"{_text(received)} of the block"
            )

    def _pair(self, side: Side, owner: int, rank: int) -> tuple[int, int]:
        """Return (owner of the queries, owner of the keys), as members of the ring, for a block on a rank."""
        block, local = self._plan.member(owner), self._plan.member(rank)
        return (local, block) if side == "kv" else (block, local)

    def _count(self, side: Side, owner: int) -> int:
        layout = self._call.k_layout if side == "kv" else self._call.layout
        return layout.count(self._plan.member(owner))


def _fits(rows: Rows, count: int) -> bool:
    return bool(rows) and rows[0][0] >= 0 and rows[-1][1] <= count


def _text(rows: Rows) -> str:
    """Return a number of rows and their ranges, of which long lists are cut."""
    ranges = " ".join(f"[{start}, {stop})" for start, stop in rows[:3]) + (" ..." if len(rows) > 3 else "")
    count = count_rows(rows)
    return f"{count:,} row{'' if count == 1 else 's'} {ranges}"
