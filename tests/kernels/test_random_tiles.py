"""Launch tables of our kernels by brute force, for random lists of disjoint tiles: each visible pair once, no other.

Boxes and bands of any kind, rows that see nothing, lengths that no block divides; block sizes as every chip has them.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

import numpy as np
import pytest

pytest.importorskip("triton")
from burst_portable.backends.cuda.hopper.block_tables import backward_table, forward_table
from burst_portable.kernels.triton.blocks import BLOCK_FIELDS, ENTRY_FIELDS, BlockTable, block_table, transposed
from burst_portable.kernels.triton.tuning import HALF, SINGLE
from burst_portable.planning.tiles import Tile, Tiles, banded_box
from tests.kernels.test_hopper_tables import painted

LENGTH = 600
LISTS = 60
SIZES = sorted(
    {
        (blocks.rows, blocks.columns)
        for table in (HALF, SINGLE)
        for sizes in table.values()
        for tuning in sizes.values()
        for choices in (tuning.forward, tuning.keys, tuning.queries, tuning.resumed)
        for blocks in choices
    }
)


def boxes(rng: random.Random, rows: tuple[int, int], columns: tuple[int, int], depth: int) -> Iterator[tuple[int, ...]]:
    """Disjoint boxes: a box cut in two, and its parts again; some are left out."""
    if depth == 0:
        if rng.random() < 0.75:
            yield (*rows, *columns)
        return
    first, last = (rows, columns) if rng.random() < 0.5 else (columns, rows)
    middle = rng.randint(first[0] + 1, first[1] - 1) if first[1] - first[0] > 1 else first[1]
    for part in ((first[0], middle), (middle, first[1])):
        if part[0] < part[1]:
            yield from boxes(rng, *((part, last) if first is rows else (last, part)), depth - 1)


def random_tiles(seed: int) -> tuple[Tiles, np.ndarray]:
    """Disjoint tiles, and how often they hold each pair of [rows, columns]."""
    rng = random.Random(seed)
    rows, columns = (
        rng.choice([1, 65, 256, rng.randint(2, 100), rng.randint(2, LENGTH), rng.randint(300, LENGTH)])
        for _ in range(2)
    )
    made: list[Tile] = []
    for box in boxes(rng, (0, rows), (0, columns), rng.randint(0, 4)):
        least, most = box[0] - box[3] - 1, box[1] - box[2] + 1
        edges = sorted(rng.choice([least, most, rng.randint(least, most)]) for _ in range(rng.choice([2, 2, 4])))
        bands = zip(edges[::2], edges[1::2], strict=True)
        made += [tile for first, past in bands if (tile := banded_box(*box, first, past - 1))]
    i, j = np.arange(rows)[:, None], np.arange(columns)
    seen = np.zeros((rows, columns), np.int8)
    for t in made:
        box = (i >= t.q_start) & (i < t.q_stop) & (j >= t.k_start) & (j < t.k_stop)
        seen += box & (i - j >= t.lo) & (i - j <= t.hi)
    assert seen.max(initial=0) <= 1, "the tiles are disjoint"
    return Tiles(made), seen


def walked(table: BlockTable, tiles: Sequence[Tile], shape: tuple[int, ...], height: int, width: int) -> np.ndarray:
    """How often the kernels of `kernels.triton` count each pair when they walk over a table as `common` says."""
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
def test_portable_tables(size: tuple[int, int]) -> None:
    for seed in range(LISTS):
        tiles, seen = random_tiles(seed)
        for these, right in ((tiles, seen), ([transposed(tile) for tile in tiles], seen.T)):
            for every_row in (False, True):
                table = block_table(these, *right.shape, *size, every_row=every_row)
                starts = table.data[: BLOCK_FIELDS * table.blocks : BLOCK_FIELDS]
                assert len(set(starts)) == len(starts), "each block of rows is one program's"
                assert not every_row or len(starts) == -(-right.shape[0] // size[0])
                assert (walked(table, these, right.shape, *size) == right).all(), seed


@pytest.mark.parametrize("size", [(8, 16), (128, 128), (192, 128)], ids=str)
def test_hopper_forward_tables(size: tuple[int, int]) -> None:
    """Blocks smaller than real ones, too: in those, an edge that is one off shows more often."""
    for seed in range(LISTS):
        tiles, seen = random_tiles(seed)
        rows, columns = seen.shape
        for every_block in (False, True):
            table = forward_table(tiles, rows, *size, every_block)
            found = painted(table, *size, peel=True, length=LENGTH)
            assert (found[:rows, :columns] == seen).all(), seed
            assert not found[:rows, columns:].any(), seed


@pytest.mark.parametrize("size", [(8, 16), (64, 128), (128, 128)], ids=str)
def test_hopper_backward_tables(size: tuple[int, int]) -> None:
    for seed in range(LISTS):
        tiles, seen = random_tiles(seed)
        rows, columns = seen.shape
        for every_block_of in (0, columns):
            table = backward_table(tiles, rows, *size, every_block_of)
            runs = [table.numbers[16 * w + 1 : 16 * w + 3] for w in range(table.blocks)]
            assert not any(table.numbers[at + 2 * n] % 4 for at, count in runs for n in range(count)), "as TMA reads"
            found = painted(table, *reversed(size), peel=False, length=LENGTH)
            assert (found[:columns, :rows] == seen.T).all(), seed
            assert not found[columns:, :rows].any(), seed
