"""The Hopper launch tables against dense masks: every pair exactly once, and nothing but the mask."""

import numpy as np
import pytest

from burst_portable.backends.cuda.hopper_tables import LaunchTable, backward_table, forward_table
from burst_portable.tiles import Tile, Tiles, fuse

SEQ = 700
CASES = {
    "full": [Tile(0, SEQ, 0, SEQ, -SEQ, SEQ)],
    "causal": [Tile(0, SEQ, 0, SEQ, 0, SEQ)],
    "anticausal": [Tile(0, SEQ, 0, SEQ, -SEQ, 0)],
    "window": [Tile(0, SEQ, 0, SEQ, 0, 150)],
    "short rows": [Tile(130, 200, 0, 600, -SEQ, SEQ)],
    "one pair": [Tile(300, 301, 500, 501, -200, -200)],
    "documents": [Tile(0, 100, 0, 100, 0, 99), Tile(100, 250, 100, 250, 0, 149), Tile(250, 700, 250, 700, 0, 449)],
    "sink and window": [Tile(0, SEQ, 8, SEQ, 0, 100), Tile(0, SEQ, 0, 8, 0, SEQ)],
    "nothing": [],
}


def dense(tiles: Tiles) -> np.ndarray:
    seen = np.zeros((SEQ, SEQ), dtype=int)
    rows, columns = np.arange(SEQ)[:, None], np.arange(SEQ)[None, :]
    for t in tiles:
        inside = (rows >= t.q_start) & (rows < t.q_stop) & (columns >= t.k_start) & (columns < t.k_stop)
        seen += inside & (rows - columns >= t.lo) & (rows - columns <= t.hi)
    return seen


def painted(table: LaunchTable, outer: int, inner: int) -> np.ndarray:
    """What a kernel would see: outer x inner, with room for padding."""
    seen = np.zeros((SEQ + outer, SEQ + 2 * inner), dtype=int)
    for w in range(table.blocks):
        index, runs_at, runs, full, masked_at, masked, *_ = table.numbers[8 * w : 8 * w + 8]
        block = slice(index * outer, (index + 1) * outer)
        counted = 0
        for r in range(runs):
            start, count = table.numbers[runs_at + 2 * r : runs_at + 2 * r + 2]
            seen[block, start : start + count * inner] += 1
            counted += count
        assert counted == full
        for i in range(masked):
            at = masked_at + 8 * i
            start, in_start, in_stop, out_start, out_stop, lo, hi, _ = table.numbers[at : at + 8]
            o, i_ = np.arange(block.start, block.stop)[:, None], start + np.arange(inner)[None, :]
            shown = (i_ >= in_start) & (i_ < in_stop) & (o >= out_start) & (o < out_stop)
            shown &= (o - i_ >= lo) & (o - i_ <= hi)
            seen[block, start : start + inner] += shown
    return seen


@pytest.mark.parametrize("name", CASES)
def test_forward_table_paints_the_mask(name):
    tiles = Tiles(CASES[name])
    table = forward_table(tiles, SEQ, 128, 128, every_block=True)
    assert table.blocks == 6
    assert all(table.numbers[8 * w + 5] >= 1 for w in range(table.blocks)), "the kernel peels a masked block"
    seen = painted(table, 128, 128)
    assert (seen[:SEQ, :SEQ] == dense(tiles)).all()
    assert (seen[:SEQ, SEQ:] == 0).all(), "keys past the end must be hidden"


@pytest.mark.parametrize("name", CASES)
def test_backward_table_paints_the_mask(name):
    tiles = Tiles(CASES[name])
    seen = painted(backward_table(tiles, SEQ, 64, 128), 128, 64)
    assert (seen[:SEQ, :SEQ] == dense(tiles).T).all()
    assert (seen[SEQ:] == 0).all(), "keys past the end must be hidden: their P is not finite"


def test_only_border_blocks_are_masked():
    causal = Tiles([Tile(0, 1024, 0, 1024, 0, 1023)])
    table = forward_table(causal, 1024, 128, 128, every_block=False)
    assert [table.numbers[8 * w + 5] for w in range(8)] == [1] * 8
    assert [table.numbers[8 * w] for w in range(8)] == [7, 6, 5, 4, 3, 2, 1, 0], "long rows first"
    table = backward_table(causal, 1024, 64, 128)
    assert [table.numbers[8 * w + 5] for w in range(8)] == [2] * 8


def test_blocks_that_see_nothing_are_not_launched_for_a_state():
    tiles = fuse([Tile(300, 301, 500, 501, -200, -200)])
    assert forward_table(tiles, SEQ, 128, 128, every_block=False).blocks == 1


def test_size_follows_the_border_and_not_the_area():
    n = 1 << 17
    table = forward_table(Tiles([Tile(0, n, 0, n, 0, n - 1)]), n, 128, 128, every_block=True)
    assert len(table.numbers) <= (8 + 2 + 8) * (n // 128)
