"""Test tiles, intersections of masks and layouts, against matrices. A million tokens need little time and memory."""

from __future__ import annotations

import random
import time
import tracemalloc
from collections import defaultdict
from dataclasses import astuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from burst_portable.conformance.cases import LENGTH, MASKS
from burst_portable.conformance.oracle import dense_mask
from burst_portable.errors import LayoutError
from burst_portable.layout import NAMES, OF_DOCUMENTS, Segment, make_layout
from burst_portable.mask import UNBOUNDED, Mask
from burst_portable.planning import tiles
from burst_portable.planning.tiles import BlockPairs, Tile, Tiles, find_tiles, fuse, make_box, make_tile

sizes = st.integers(1, 9)
bounds = st.integers(-12, 14)


def cells(tile: Tile) -> set[tuple[int, int]]:
    return {
        (i, j)
        for i in range(tile.q_start, tile.q_stop)
        for j in range(tile.k_start, tile.k_stop)
        if tile.lo <= i - j <= tile.hi
    }


@given(st.integers(0, 5), sizes, st.integers(0, 5), sizes, bounds, bounds)
def test_make_tile_keeps_cells_and_trims_empty_edges(q, rows, k, columns, lo, hi):
    box = {(i, j) for i in range(q, q + rows) for j in range(k, k + columns) if lo <= i - j <= hi}
    tile = make_tile(q, q + rows, k, k + columns, lo, hi)
    if tile is None:
        assert not box
        return
    assert cells(tile) == box
    assert {i for i, _ in box} == set(range(tile.q_start, tile.q_stop))
    assert {j for _, j in box} == set(range(tile.k_start, tile.k_stop))
    assert tile.num_pairs == len(box)
    assert tile.full == (len(box) == tile.rows * tile.columns)


@given(st.integers(0, 9), sizes, st.integers(0, 9), sizes, bounds, bounds, st.integers(1, 5))
def test_visited_counts_whole_column_blocks(q, rows, k, columns, lo, hi, block):
    """For each block of rows: from the first visible column to the last."""
    tile = make_tile(q, q + rows, k, k + columns, lo, hi)
    if tile is None:
        return
    seen = defaultdict(list)
    for i, j in cells(tile):
        seen[i // block].append(j)
    counted = sum(-(-(max(row) + 1 - min(row)) // block) for row in seen.values())
    assert tile.visited(block) == (tile.num_pairs if block == 1 else counted * block * block)


@pytest.mark.parametrize(("lo", "hi"), [(0, UNBOUNDED), (0, 4096), (-UNBOUNDED, UNBOUNDED), (-UNBOUNDED, 5)])
def test_visited_estimates_long_tiles(lo, hi):
    """The estimate is close to the count of both halves."""
    whole = make_tile(0, 16384, 0, 16384, lo, hi)
    parts = [whole.clipped(start, start + 8192, 0, 16384) for start in (0, 8192)]
    assert whole.visited(128) == pytest.approx(sum(part.visited(128) for part in parts), rel=0.02)


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("layout", NAMES)
@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 8])
def test_tiles_cover_each_visible_pair_once(name, layout, ranks):
    mask = MASKS[name]
    try:
        where = make_layout(layout, LENGTH, ranks, mask)
    except LayoutError:
        assert layout in OF_DOCUMENTS
        return
    covered = torch.zeros(LENGTH, LENGTH, dtype=torch.int64)
    pairs = BlockPairs(mask, where.shards, where.shards)
    for q_shard in range(ranks):
        for k_shard in range(ranks):
            found = pairs.tiles(q_shard, k_shard)
            assert pairs.sees(q_shard, k_shard) == bool(found)
            assert pairs.num_pairs(q_shard, k_shard) == found.num_pairs
            q, k = where.positions(q_shard), where.positions(k_shard)
            for tile in found:
                for i, j in cells(tile):
                    covered[q[i], k[j]] += 1
    assert torch.equal(covered, dense_mask(mask, LENGTH).long())
    assert mask.num_pairs(LENGTH) == int(covered.sum())


@given(st.data())
def test_find_tiles_equals_mask_for_random_segments(data):
    """Segments may cross; with many keys, those that do not are searched by bisection."""
    mask = data.draw(st.sampled_from(list(MASKS.values())))
    step = data.draw(st.integers(1, 4))

    def side(most):
        starts = data.draw(st.lists(st.integers(0, 30), min_size=1, max_size=most, unique=True))
        return [Segment(s, data.draw(st.integers(1, 5)), step) for s in starts]

    queries, keys = side(3), side(9)
    seen = dense_mask(mask, LENGTH)
    q = [p for s in queries for p in s.positions()]
    k = [p for s in keys for p in s.positions()]
    expected = [(i, j) for i, a in enumerate(q) for j, b in enumerate(k) if seen[a, b]]
    found = [cell for tile in find_tiles(mask, queries, keys) for cell in cells(tile)]
    assert sorted(found) == expected  # sorted, so that a cell in two tiles appears twice


def test_find_tiles_gives_one_causal_tile_for_zigzag_and_striped():
    for layout in ("zigzag", "striped"):
        where = make_layout(layout, 4096, 8)
        pairs = [(a, b) for a in where.shards for b in where.shards]
        assert all(len(find_tiles(Mask.causal(), a, b)) == 1 for a, b in pairs)


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), min_size=1, max_size=9, unique=True), st.integers(1, 4)
)
def test_fused_keeps_visible_pairs(corners, size):
    made = [make_tile(a * size, (a + 1) * size, b * size, (b + 1) * size, -99, 99) for a, b in corners]
    larger = [Tile(*box) for box in fuse([astuple(tile) for tile in made])]
    assert len(larger) <= len(made)
    assert sorted(c for t in larger for c in cells(t)) == sorted(c for t in made for c in cells(t))


@pytest.mark.parametrize(
    ("corners", "boxes"),
    [
        # Two columns of blocks: the next block below one follows a block of the other column.
        ([(0, 0), (0, 2), (1, 0), (1, 2), (2, 0), (2, 2)], [(0, 3, 0, 1), (0, 3, 2, 3)]),
        # The lower row is full only after its blocks are joined. Then it is joined with the upper row, which was tried
        # before.
        ([(0, 0, 2), (1, 0), (1, 1), (5, 5)], [(0, 2, 0, 2), (5, 6, 5, 6)]),
        # Too many to compare all pairs; adjacent ones are still joined.
        (
            [corner for row in range(0, 36, 2) for corner in ((row, row), (row, row + 1))],
            [(row, row + 1, row, row + 2) for row in range(0, 36, 2)],
        ),
    ],
    ids=["columns", "rows", "many"],
)
def test_fused_merges_adjacent_boxes(corners, boxes):
    """Boxes of 4 by 4 or several times as wide, in any order."""
    made = [(4 * row, 4 * row + 4, 4 * at, 4 * (at + sum(wide or [1])), -999, 999) for row, at, *wide in corners]
    expected = [tuple(4 * edge for edge in box) for box in boxes]
    for some in (made, made[::-1], random.sample(made, len(made))):
        assert sorted(box[:4] for box in fuse([make_box(*box) for box in some])) == expected


def test_find_tiles_rejects_different_steps():
    with pytest.raises(LayoutError, match="different steps"):
        find_tiles(Mask.full(), [Segment(0, 4, 2)], [Segment(0, 4, 1)])


def test_block_pairs_compare_visible_segments_only(monkeypatch):
    """Only pairs of segments with a visible pair are examined."""
    looked, box = [], tiles._visible_box
    monkeypatch.setattr(tiles, "_visible_box", lambda *given: looked.append(box(*given)) or looked[-1])
    mask = Mask.documents(range(0, 4001, 40))
    where = make_layout("document_zigzag", 4000, 4, mask)
    pairs = BlockPairs(mask, where.shards, where.shards)
    assert sum(pairs.num_pairs(q, k) for q in range(4) for k in range(4)) == 100 * (40 * 41 // 2)
    assert len(looked) > 100
    assert None not in looked


def test_find_tiles_of_a_million_tokens_needs_little_memory():
    """Nothing may grow with the number of tokens. The time bound is generous."""
    length, ranks = 1 << 20, 1024
    cumulative = [*range(0, length, length // 500 + 1), length]
    tracemalloc.start()
    started = time.process_time()
    mask = Mask.documents(cumulative)
    where = make_layout("zigzag", length, ranks)
    found = [find_tiles(mask, where.shards[5], where.shards[owner]) for owner in range(ranks)]
    seconds = time.process_time() - started
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert sum(t.num_pairs for t in found) > 0
    assert peak < 4 << 20
    assert seconds < 10


def test_in_rows_clips_tiles():
    tiles = Tiles([Tile(0, 300, 0, 300, 0, 299), Tile(300, 400, 50, 60, 240, 349)])
    part = tiles.in_rows(128, 350)
    pairs = {(q, k) for t in tiles for q in range(t.q_start, t.q_stop) for k in range(t.k_start, t.k_stop)
             if t.lo <= q - k <= t.hi}  # fmt: skip
    found = {(q + 128, k) for t in part for q in range(t.q_start, t.q_stop) for k in range(t.k_start, t.k_stop)
             if t.lo <= q - k <= t.hi}  # fmt: skip
    assert found == {(q, k) for q, k in pairs if 128 <= q < 350}
    assert found
    assert tiles.in_rows(400, 500) == ()
    assert Tiles().in_rows(0, 500) == ()
    assert tiles.in_rows(128, 350) is part
