"""Test how tiles are split for operators that support full boxes, causal squares and windows."""

from __future__ import annotations

import itertools

import pytest
import torch

import burst_portable as bp
from burst_portable.conformance.cases import LENGTH, MASKS
from burst_portable.kernels.operator_kernel import causal_squares, causal_window
from burst_portable.layout import make_layout
from burst_portable.planning.tiles import Tile, find_tiles, make_tile


def boxes(length):
    """Yield tiles of all kinds: full masks, striped layouts, and narrow bands across small boxes."""
    for mask in MASKS.values():
        for layout, ranks in (("contiguous", 1), ("striped", 3)):
            shards = make_layout(layout, length, ranks, mask).shards
            yield from (tile for a in shards for b in shards for tile in find_tiles(mask, a, b))
    for rows, columns, lo, width in itertools.product((1, 2, 5), (1, 3, 6), range(-6, 5), range(7)):
        if tile := make_tile(3, 3 + rows, 2, 2 + columns, 1 + lo, 1 + lo + width):
            yield tile


NO_CAUSAL_WINDOW = {
    "causal": [Tile(0, 9, 0, 9, 0, 8)],
    "causal, with another bound": [Tile(0, 9, 0, 9, 0, 100)],
    "a box": [Tile(0, 9, 0, 9, -8, 8)],
    "a window of both sides": [Tile(0, 9, 0, 9, -1, 3)],
    "a window that begins before its row": [Tile(0, 9, 0, 9, 1, 3)],
    "only some rows": [Tile(1, 9, 0, 9, 0, 3)],
    "only some columns": [Tile(0, 9, 0, 8, 0, 3)],
    "a window of fewer rows": [Tile(0, 8, 0, 8, 0, 3)],
    "two documents": [Tile(0, 4, 0, 4, 0, 2), Tile(4, 9, 4, 9, 0, 2)],
    "a window and sinks": [Tile(0, 9, 0, 9, 0, 3), Tile(4, 9, 0, 2, 4, 8)],
    "nothing": [],
}


def test_causal_window_recognizes_windows():
    (whole,) = make_layout("contiguous", 9, 1).shards
    for left in range(8):
        assert causal_window(find_tiles(bp.Mask.window(left), whole, whole), 9, 9) == left
    assert causal_window([Tile(0, 1, 0, 1, 0, 0)], 1, 1) is None


@pytest.mark.parametrize("case", NO_CAUSAL_WINDOW)
def test_causal_window_returns_none_for_other_tiles(case):
    assert causal_window(NO_CAUSAL_WINDOW[case], 9, 9) is None


@pytest.mark.parametrize(("rows", "columns"), [(9, 10), (10, 9), (10, 10)])
def test_causal_window_returns_none_for_partial_windows(rows, columns):
    assert causal_window([Tile(0, 9, 0, 9, 0, 3)], rows, columns) is None


def test_causal_squares_cover_each_cell_once():
    """Pieces are boxes or causal squares without empty rows; a reversed square is mirrored."""
    kinds = set()
    for tile in boxes(LENGTH):
        covered = torch.zeros(LENGTH, LENGTH, dtype=torch.int64)
        for piece in causal_squares(tile):
            box = torch.ones(piece.rows.stop - piece.rows.start, piece.columns.stop - piece.columns.start).long()
            assert box.numel()
            if piece.causal:
                assert box.shape[0] == box.shape[1]
                box = box.tril()
            covered[piece.rows, piece.columns] += box.flip(0, 1) if piece.reversed else box
            kinds.add((piece.causal, piece.reversed))
        distance = torch.arange(LENGTH).unsqueeze(1) - torch.arange(LENGTH)
        inside = (distance >= tile.lo) & (distance <= tile.hi)
        expected = torch.zeros(LENGTH, LENGTH, dtype=torch.int64)
        cut = slice(tile.q_start, tile.q_stop), slice(tile.k_start, tile.k_stop)
        expected[cut] = inside[cut].long()
        assert torch.equal(covered, expected), tile
    assert kinds == {(False, False), (True, False), (True, True)}
