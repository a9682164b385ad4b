"""How the Hopper kernels are cut, by head size, and which cut, or cuts, a pass gets."""

from __future__ import annotations

from dataclasses import dataclass

from burst_portable.backends.cuda.hopper.block_tables import LaunchTable, Span, backward_table, forward_table
from burst_portable.planning.tiles import Tiles


@dataclass(frozen=True, slots=True)
class ForwardConfig:
    """How the forward kernel is cut.

    Attributes:
        BN: keys of a block.
        NS: slots of shared memory for blocks of keys, and as many for values.
        W: workers, warpgroups of 64 query rows.
        REGS: registers of a worker's thread.
        share: stage the result where the queries were. Large heads leave no shared memory for both. A float32 result
            is then written without TMA.
    """

    BN: int
    NS: int
    W: int
    REGS: int
    maxnreg: int
    share: bool = False


@dataclass(frozen=True, slots=True)
class BackwardConfig:
    """How the backward kernel is cut.

    Attributes:
        BM: queries of a block.
        NQ: slots of shared memory for blocks of queries.
        REGS: registers of a thread of the two workers of 64 keys.
        early: read the row terms before the product that they are added to, not after it.
    """

    BM: int
    NQ: int
    REGS: int
    maxnreg: int
    early: int = 0


@dataclass(frozen=True, slots=True)
class SplitConfig:
    """How a launch of the split backward, for one gradient, is cut.

    Attributes:
        BN: streamed rows of a block.
        NX, NY: slots for the streamed rows that make S (keys or queries), and for those that make dP (values or dO).
        early: row terms that are read before the products: 0 none, 1 LSE, 2 LSE and delta.
        REGS: registers of a thread of the two workers of 64 rows.
    """

    BN: int
    NX: int
    NY: int
    early: int = 0
    REGS: int = 240
    maxnreg: int = 168


PANELS = ((64, 0), (64, 16), (64, 32), (128, 0), (128, 16), (128, 32), (128, 64), (128, 128))


def panels(size: int) -> tuple[int, int]:
    """Return the columns of both panels in which shared memory holds a head of this size; the second may be 0.

    Gluon wants powers of two. TMA reads 0 past a head's end, and writes nothing there.
    """
    return next(pair for pair in PANELS if sum(pair) >= size)


def forward_value_panels(size: int) -> tuple[int, int]:
    """Return the panels of V and out in the forward.

    One product of 128 columns takes less time than one of 64 and one of 16 or 32, because P is read once.
    """
    return (128, 0) if 64 < size <= 128 else panels(size)


FORWARD: dict[tuple[int, int], ForwardConfig] = {
    (128, 128): ForwardConfig(128, 2, 2, 240, 168),
    (160, 160): ForwardConfig(128, 2, 2, 240, 168, share=True),
    (192, 128): ForwardConfig(128, 2, 2, 240, 168, share=True),
    (256, 256): ForwardConfig(64, 2, 2, 240, 168, share=True),
}
"""By the largest sizes of heads and of value heads, in order: the first that holds both serves them."""

SPLIT: dict[tuple[int, int], tuple[SplitConfig, SplitConfig, SplitConfig]] = {
    (160, 160): (SplitConfig(64, 3, 3), SplitConfig(64, 3, 3, early=2), SplitConfig(64, 3, 3)),
    (192, 128): (SplitConfig(64, 3, 3), SplitConfig(64, 3, 3, early=1), SplitConfig(128, 2, 2)),
    (192, 192): (SplitConfig(64, 2, 2), SplitConfig(64, 2, 2, early=1), SplitConfig(64, 3, 3)),
    (256, 256): (SplitConfig(64, 2, 1), SplitConfig(64, 2, 1, early=1), SplitConfig(64, 2, 2)),
}
"""Of dQ, dK and dV, for heads or value heads above 128: by the largest sizes, as in `FORWARD`."""


def forward_config(dim: int, value_dim: int) -> ForwardConfig:
    """Return the cut of the forward for these sizes of heads and value heads."""
    return next(config for (d, v), config in FORWARD.items() if dim <= d and value_dim <= v)


def backward_config(dim: int, value_dim: int) -> BackwardConfig:
    """Return the cut of the backward that computes all gradients in one launch, for sizes up to 128."""
    return next(config for size, config in BACKWARD.items() if max(dim, value_dim) <= size)


def split_configs(dim: int, value_dim: int) -> tuple[SplitConfig, SplitConfig, SplitConfig] | None:
    """Return the cuts of the launches for dQ, dK and dV; None if one launch computes all gradients."""
    if max(dim, value_dim) <= max(BACKWARD):
        return None
    return next(configs for (d, v), configs in SPLIT.items() if dim <= d and value_dim <= v)


TALL = {64: ForwardConfig(128, 2, 3, 160, 128)}
"""Each key block serves three workers: faster where rows are long and there are many of them."""
BACKWARD = {
    64: BackwardConfig(128, 2, 240, 168),
    96: BackwardConfig(64, 2, 240, 168, early=1),  # +10 % at 80 and +6 % at 96 on one H100; -2 % at 112
    128: BackwardConfig(64, 2, 240, 168),
}
"""By the largest size of heads and value heads."""
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
    tiles: Tiles, rows: int, dim: int, value_dim: int, heads: int, processors: int, *, every_block: bool
) -> tuple[ForwardConfig, LaunchTable]:
    """Return the faster cut for these tiles, by what was measured on one H100 (benchmarks/attention.py).

    Args:
        rows: length of the queries.
        dim, value_dim: the sizes of heads and value heads.
        heads: query heads of all batches.
        every_block: launch query blocks that see nothing as well.
    """
    tall = TALL.get(max(dim, value_dim))
    if tall is not None:
        table = forward_table(tiles, rows, 64 * tall.W, tall.BN, every_block, blocks_per_mebibyte(tall.BN, dim))
        enough = table.blocks * heads >= TALL_ITEMS * processors
        if enough and table.total >= TALL_BLOCKS * table.blocks:
            return tall, table
    config = forward_config(dim, value_dim)
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
    dim, value_dim: sizes of heads and value heads.
    heads: query heads of all batches, of which `group` share a K/V head.
    """

    rows: int
    keys: int
    dim: int
    value_dim: int
    heads: int
    group: int
    processors: int

    def ends_late(self, table: LaunchTable) -> bool:
        """Whether its last program may end long after the others if each computes all heads of a group."""
        return table.longest * self.group * LATE * self.processors > table.total * self.heads


def adding_cut(tiles: Tiles, about: Pass) -> tuple[BackwardCut, LaunchTable]:
    """The cut if dK and dV are added to."""
    config = backward_config(about.dim, about.value_dim)
    table = backward_table(tiles, about.rows, config.BM, KEY_BLOCK)
    return BackwardCut(config, 1 if about.ends_late(table) else about.group), table


def writing_cuts(tiles: Tiles, about: Pass) -> list[tuple[BackwardCut, LaunchTable]]:
    """The cuts if dK and dV are written once, by programs that compute all query heads of their keys.

    If a few keys, such as sinks, are seen by so many queries that their programs would end late, a second launch
    divides them and adds up. An empty list means that everything is better added up, by programs of one head or of some
    queries.
    """
    config = backward_config(about.dim, about.value_dim)
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
