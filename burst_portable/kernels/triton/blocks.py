"""Build launch tables on the host: the ranges of columns that each block of rows computes of each tile.

A program has one block of rows ("own" rows) and computes one block of columns after the other. For every tile that
contains some of these rows, the table has one entry with three ranges of columns::

                columns   left      full           right
                         ......|##############|.......
      own rows           ..####|##############|####...      left and right: cut by a border, masked
                         ..####|##############|#####..      full: visible to all own rows, no mask
                         .#####|##############|######.

Columns that are hidden from all own rows are in no range, so they are never read. Blocks with most work come first, so
that the last programs are short. The backward pass over dK and dV uses the table of the transposed tiles.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from burst_portable.planning.tiles import Tile

BLOCK_FIELDS = 4
"""first own row, offset of its first entry, offset past its last, 0."""
ENTRY_FIELDS = 12
"""full start and count, left start and count, right start and count (counts in blocks), lo, hi, first and past
own row of the tile, past its last column, and the last column at which a whole block may start."""
ALIGNMENT = 4
_FAR = 1 << 30  # a bound of a band beyond any index


@dataclass(frozen=True)
class BlockTable:
    """A table on the host. `data` is int32, with the blocks before the entries; offsets count from its start."""

    data: np.ndarray
    blocks: int
    reads_past_tiles: bool
    """Whether a block may load columns past its tile that exist in the tensor, which only masked loads may do."""
    aligned: bool
    """Whether every block of columns starts at a multiple of `ALIGNMENT`."""


def transposed(tile: Tile) -> Tile:
    """Return the tile with rows and columns exchanged."""
    return Tile(tile.k_start, tile.k_stop, tile.q_start, tile.q_stop, -tile.hi, -tile.lo)


def block_table(
    tiles: Sequence[Tile], rows: int, columns: int, block_rows: int, block_columns: int, *, every_row: bool
) -> BlockTable:
    """Return the table of `tiles`, in tensors of `rows` and `columns`.

    `every_row`: whether to include blocks without tiles, so that the kernel writes all rows.
    """
    parts = [_entries(tile, rows, block_rows, block_columns) for tile in tiles]
    owner = np.concatenate([block for block, _ in parts]) if parts else np.empty(0, np.int64)
    entries = np.concatenate([e for _, e in parts]) if parts else np.empty((0, ENTRY_FIELDS), np.int64)
    total = -(-rows // block_rows)
    listed = np.arange(total) if every_row else np.unique(owner)
    work = np.bincount(owner, weights=entries[:, 1] + 1.5 * (entries[:, 3] + entries[:, 5]), minlength=total)
    order = listed[np.argsort(-work[listed], kind="stable")]
    rank = np.zeros(total, np.int64)
    rank[order] = np.arange(len(order))
    entries = entries[np.argsort(rank[owner], kind="stable")]
    past = np.cumsum(np.bincount(owner, minlength=total)[order]) * ENTRY_FIELDS + len(order) * BLOCK_FIELDS
    first = np.concatenate(([len(order) * BLOCK_FIELDS], past[:-1])) if len(order) else past
    blocks = np.stack([order * block_rows, first, past, np.zeros_like(past)], axis=1)
    return BlockTable(
        np.concatenate([blocks.ravel(), entries.ravel()]).astype(np.int32),
        len(order),
        any(t.columns < block_columns and t.k_stop < columns for t in tiles),
        not (entries[:, (0, 2, 4, 11)] % ALIGNMENT).any() and block_columns % ALIGNMENT == 0,
    )


def _entries(tile: Tile, rows: int, block_rows: int, block_columns: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the indices of the blocks of rows that a tile crosses, and an entry for each."""
    lo, hi = max(tile.lo, -_FAR), min(tile.hi, _FAR)
    block = np.arange(tile.q_start // block_rows, -(-tile.q_stop // block_rows))
    start = block * block_rows
    first = np.maximum(start, tile.q_start)
    past = np.minimum(start + block_rows, tile.q_stop)
    # Columns that are visible to any row of the block, and those that are visible to all of them.
    seen_first = np.maximum(tile.k_start, first - hi)
    seen_past = np.minimum(tile.k_stop, past - lo)
    whole = (first == start) & ((past == start + block_rows) | (past == rows))
    all_first = np.maximum(tile.k_start, past - 1 - hi)
    all_past = np.where(whole, np.minimum(tile.k_stop, first - lo + 1), 0)
    left = np.maximum(0, -((seen_first - all_first) // block_columns))
    full_start = seen_first + left * block_columns
    full = np.maximum(0, (all_past - full_start) // block_columns)
    left = np.where(full > 0, left, 0)
    right_start = np.where(full > 0, full_start + full * block_columns, seen_first)
    right = np.maximum(0, -((right_start - seen_past) // block_columns))
    same = np.ones_like(block)
    last_start = max(tile.k_start, tile.k_stop - block_columns)
    entry = np.stack(
        [full_start, full, seen_first, left, right_start, right]
        + [same * x for x in (lo, hi, tile.q_start, tile.q_stop, tile.k_stop, last_start)],
        axis=1,
    )
    some = seen_first < seen_past
    return block[some], entry[some]
