"""How the Hopper kernels are cut, by head size, and which cut, or cuts, a pass gets."""

from __future__ import annotations

from dataclasses import dataclass

from burst_portable.backends.cuda.hopper.block_tables import LaunchTable, Span, backward_table, forward_table
from burst_portable.planning.tiles import Tiles


@dataclass(frozen=True, slots=True)
class ForwardConfig:
    """Key blocks of BN, NS slots, W workers (warpgroups) of 64 query rows, registers per thread of theirs."""

    BN: int
    NS: int
    W: int
    REGS: int
    maxnreg: int


@dataclass(frozen=True, slots=True)
class BackwardConfig:
    """Query blocks of BM, NQ slots, registers per thread of the two workers of 64 keys."""

    BM: int
    NQ: int
    REGS: int
    maxnreg: int


FORWARD = {64: ForwardConfig(128, 2, 2, 240, 168), 128: ForwardConfig(128, 2, 2, 240, 168)}
TALL = {64: ForwardConfig(128, 2, 3, 160, 128)}
"""Each key block serves three workers: faster where rows are long and there are many of them."""
BACKWARD = {64: BackwardConfig(128, 2, 240, 168), 128: BackwardConfig(64, 2, 240, 168)}
KEY_BLOCK = 128  # of the backward

TALL_BLOCKS = 32  # key blocks that a query block must visit, on average, for the tall cut to be worth it
TALL_ITEMS = 4  # query blocks of all heads per multiprocessor that the tall cut needs
ROOM = 64  # key blocks, of heads of 128, that a program visits before it makes way: about 0.1 ms on one H100
LATE = 6  # a program of the backward may be at most 1/LATE of what a multiprocessor does
FEW = 4  # keys whose gradients are added up separately may be at most 1/FEW of all


@dataclass(frozen=True, slots=True)
class BackwardCut:
    """One launch of the backward.

    span: query heads that one program computes.
    keys: [start, stop) of the only keys that it sees, and whose gradients it adds up; None: all.
    """

    config: BackwardConfig
    span: int
    keys: Span | None = None


def forward_cut(
    tiles: Tiles, rows: int, dim: int, heads: int, processors: int, *, every_block: bool
) -> tuple[ForwardConfig, LaunchTable]:
    """The faster cut for these tiles, by what was measured on one H100 (benchmarks/attention.py).

    Args:
        rows: length of the queries.
        heads: query heads of all batches.
        every_block: launch query blocks that see nothing as well.
    """
    tall = TALL.get(dim)
    if tall is not None:
        table = forward_table(tiles, rows, 64 * tall.W, tall.BN, every_block, blocks_per_mebibyte(tall.BN, dim))
        enough = table.blocks * heads >= TALL_ITEMS * processors
        if enough and table.total >= TALL_BLOCKS * table.blocks:
            return tall, table
    config = FORWARD[dim]
    return config, forward_table(
        tiles, rows, 64 * config.W, config.BN, every_block, blocks_per_mebibyte(config.BN, dim)
    )


def turns(table: LaunchTable, dim: int, heads: int, at_once: int) -> int:
    """Query blocks that a program of the forward does in a row before it makes way for kernels that move messages.

    Enough that the start of a program, about 4 us, is a small part of it; not more, since messages wait until one ends.
    Never so many that a multiprocessor has nothing to do.

    Args:
        table: of the launch.
        dim, heads: the size of a head, and how many there are in all sequences.
        at_once: programs that run side by side.
    """
    visited = table.total * dim // 128
    return max(1, min(ROOM * table.blocks // max(1, visited), table.blocks * heads // at_once))


def blocks_per_mebibyte(keys: int, dim: int) -> int:
    """Return how many blocks of this many keys, with their values, in 16 bits, make a mebibyte."""
    return (1 << 20) // (2 * 2 * keys * dim)


@dataclass(frozen=True, slots=True)
class Pass:
    """What the programs of a backward pass share.

    rows, keys: lengths of the queries and of the keys.
    heads: query heads of all batches, of which `group` share a K/V head.
    """

    rows: int
    keys: int
    dim: int
    heads: int
    group: int
    processors: int

    def ends_late(self, table: LaunchTable) -> bool:
        """Whether its last program may end long after the others if each computes all heads of a group."""
        return table.longest * self.group * LATE * self.processors > table.total * self.heads


def adding_cut(tiles: Tiles, about: Pass) -> tuple[BackwardCut, LaunchTable]:
    """The cut if dK and dV are added to."""
    config = BACKWARD[about.dim]
    table = backward_table(tiles, about.rows, config.BM, KEY_BLOCK)
    return BackwardCut(config, 1 if about.ends_late(table) else about.group), table


def writing_cuts(tiles: Tiles, about: Pass) -> list[tuple[BackwardCut, LaunchTable]]:
    """The cuts if dK and dV are written once, by programs that compute all query heads of their keys.

    If a few keys, such as sinks, are seen by so many queries that their programs would end late, a second launch
    divides them and adds up. An empty list means that everything is better added up, by programs of one head or of some
    queries.
    """
    config = BACKWARD[about.dim]
    whole = BackwardCut(config, about.group)

    def table_of(tiles: Tiles, apart: Span | None = None) -> LaunchTable:
        return backward_table(tiles, about.rows, config.BM, KEY_BLOCK, about.keys, apart=apart)

    def fits(table: LaunchTable) -> bool:
        return not about.ends_late(table) or (about.group == 1 and table.long is None)

    table = table_of(tiles)
    if fits(table):
        return [(whole, table)]
    if table.long is None or (table.long[1] - table.long[0]) * FEW > about.keys:
        return []
    start, stop = table.long
    around = Tiles((*_of_keys(tiles, 0, start), *_of_keys(tiles, stop, about.keys)))
    rest = table_of(around, apart=table.long)
    if not fits(rest):
        return []
    seen = Tiles(tile.shifted(0, -start) for tile in _of_keys(tiles, start, stop))
    divided = backward_table(seen, about.rows, config.BM, KEY_BLOCK, fill=(about.heads, about.processors))
    return [(whole, rest), (BackwardCut(config, 1, table.long), divided)]


def _of_keys(tiles: Tiles, start: int, stop: int) -> Tiles:
    parts = (tile.clipped(tile.q_start, tile.q_stop, start, stop) for tile in tiles)
    return Tiles(part for part in parts if part is not None)
