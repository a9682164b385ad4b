"""Compare the launch tables of the portable kernels with random disjoint tiles: each visible pair once, no other."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from tests.support.launch_tables import LISTS, random_tiles

pytest.importorskip("triton")
from burst_portable.kernels.triton.blocks import BLOCK_FIELDS, ENTRY_FIELDS, BlockTable, block_table, transposed
from burst_portable.kernels.triton.tuning import HALF, SINGLE
from burst_portable.planning.tiles import Tile

SIZES = sorted(
    {
        (blocks.rows, blocks.columns)
        for table in (HALF, SINGLE)
        for sizes in table.values()
        for tuning in sizes.values()
        for choices in (tuning.forward, tuning.keys, tuning.queries, tuning.resumed, tuning.values)
        for blocks in choices
    }
)


def walked(table: BlockTable, tiles: Sequence[Tile], shape: tuple[int, ...], height: int, width: int) -> np.ndarray:
    """Return how often the kernels of `kernels.triton` visit each pair when they read a table as `common` defines."""
    seen = np.zeros((shape[0], shape[1] + width), np.int8)
    for start, first, past, _ in table.data[: BLOCK_FIELDS * table.blocks].reshape(-1, BLOCK_FIELDS):
        rows = np.arange(start, min(start + height, shape[0]))
        for entry in table.data[first:past].reshape(-1, ENTRY_FIELDS):
            full, count, left_from, left, right_from, right, lo, hi, top, bottom, stop, last = map(int, entry)
            assert count == 0 or full + count * width <= stop, "what needs no mask ends where the tile does"
            seen[rows[0] : rows[-1] + 1, full : full + count * width] += 1
            lower, upper = rows - hi, np.where((rows >= top) & (rows < bottom), np.minimum(rows - lo, stop - 1), -1)
            assert last + width <= stop or any((last, stop) == (t.k_start, t.k_stop) for t in tiles), (
                "reads a tile alone"
            )
            starts = [left_from + n * width for n in range(left)] + [right_from + n * width for n in range(right)]
            for nominal in starts:
                at = np.arange(min(nominal, last), min(nominal, last) + width)
                shown = (at >= np.maximum(lower, nominal)[:, None]) & (at <= upper[:, None])
                seen[rows[0] : rows[-1] + 1, at[0] : at[-1] + 1] += shown
    assert not seen[:, shape[1] :].any(), "past the last column"
    return seen[:, : shape[1]]


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_portable_block_tables_equal_random_masks(size: tuple[int, int]) -> None:
    for seed in range(LISTS):
        tiles, seen = random_tiles(seed)
        for these, right in ((tiles, seen), ([transposed(tile) for tile in tiles], seen.T)):
            for every_row in (False, True):
                table = block_table(these, *right.shape, *size, every_row=every_row)
                starts = table.data[: BLOCK_FIELDS * table.blocks : BLOCK_FIELDS]
                assert len(set(starts)) == len(starts), "each block of rows is one program's"
                assert not every_row or len(starts) == -(-right.shape[0] // size[0])
                assert (walked(table, these, right.shape, *size) == right).all(), seed
