"""How the Hopper kernels are cut, by head size, and which cut a forward pass gets."""

from __future__ import annotations

from dataclasses import dataclass

from burst_portable.backends.cuda.hopper.tables import LaunchTable, forward_table
from burst_portable.tiles import Tiles


@dataclass(frozen=True, slots=True)
class ForwardConfig:
    """Key blocks of BN, NS slots, W workers (warpgroups) of 64 query rows, registers a thread of theirs."""

    BN: int
    NS: int
    W: int
    REGS: int
    maxnreg: int


@dataclass(frozen=True, slots=True)
class BackwardConfig:
    """Query blocks of BM, NQ slots, registers a thread of the two workers of 64 keys."""

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
TALL_ITEMS = 4  # query blocks of all heads a multiprocessor


def forward_cut(
    tiles: Tiles, rows: int, dim: int, heads: int, processors: int, *, every_block: bool
) -> tuple[ForwardConfig, LaunchTable]:
    """The faster cut for these tiles, by what was measured on one H100 (`benchmarks/results/hopper-h100.md`).

    Args:
        rows: length of the queries.
        heads: query heads of all batches.
        every_block: launch query blocks that see nothing as well.
    """
    tall = TALL.get(dim)
    if tall is not None:
        table = forward_table(tiles, rows, 64 * tall.W, tall.BN, every_block)
        enough = table.blocks * heads >= TALL_ITEMS * processors
        if enough and table.total >= TALL_BLOCKS * table.blocks:
            return tall, table
    config = FORWARD[dim]
    return config, forward_table(tiles, rows, 64 * config.W, config.BN, every_block)
