"""Test the Hopper launch tables against dense masks: each visible pair occurs once, and no other pair occurs."""

from __future__ import annotations

from itertools import chain

import pytest

from burst_portable.backends.cuda.hopper.block_tables import LaunchTable, backward_table, forward_table
from burst_portable.backends.cuda.hopper.cuts import writing_cuts
from burst_portable.planning.tiles import Tile, Tiles
from tests.support.launch_tables import (
    CASES,
    LENGTH,
    LISTS,
    SEQ,
    count_visits,
    dense,
    mask_tiles,
    pass_sizes,
    random_tiles,
)

pytest.importorskip("triton")


@pytest.mark.parametrize("name", CASES)
def test_forward_table_equals_mask(name):
    tiles = Tiles(CASES[name])
    table = forward_table(tiles, SEQ, 128, 128, every_block=True)
    assert table.blocks == (7 if name == "short rows" else 6)
    seen = count_visits(table, 128, 128, peel=True)
    assert (seen[:SEQ, :SEQ] == dense(tiles)).all()
    assert (seen[:SEQ, SEQ:] == 0).all(), "keys past the end must be hidden"


@pytest.mark.parametrize("name", CASES)
def test_backward_table_equals_mask(name):
    tiles = Tiles(CASES[name])
    seen = count_visits(backward_table(tiles, SEQ, 64, 128), 128, 64, peel=False)
    assert (seen[:SEQ, :SEQ] == dense(tiles).T).all()
    assert (seen[SEQ:] == 0).all(), "keys past the end must be hidden: their P is not finite"


def test_tables_mask_border_blocks_only():
    causal = Tiles([Tile(0, 1024, 0, 1024, 0, 1023)])
    table = forward_table(causal, 1024, 128, 128, every_block=False)
    assert [table.numbers[16 * w + 5] for w in range(8)] == [0] * 8, "but for the one that is peeled"
    assert [table.numbers[16 * w] for w in range(8)] == list(range(896, -1, -128)), "long rows first"
    table = backward_table(causal, 1024, 64, 128)
    assert [table.numbers[16 * w + 5] for w in range(8)] == [2] * 8


def test_forward_table_skips_blocks_without_keys_for_state():
    tiles = Tiles([Tile(300, 301, 500, 501, -200, -200)])
    assert forward_table(tiles, SEQ, 128, 128, every_block=False).blocks == 1


def test_backward_table_has_unseen_keys_if_gradients_are_written():
    tiles = Tiles([Tile(0, 256, 0, 256, 0, 255)])
    assert backward_table(tiles, 256, 64, 128).blocks == 2
    table = backward_table(tiles, 256, 64, 128, every_block_of=400)
    rows = [table.numbers[16 * w : 16 * w + 6] for w in range(table.blocks)]
    assert sorted(row[0] for row in rows) == [0, 128, 256, 384]
    assert [(row[2], row[3], row[5]) for row in rows if row[0] >= 256] == [(0, 0, 0)] * 2, "nothing to visit"


def visits(table: LaunchTable) -> list[list[tuple[int, ...]]]:
    """Return what each row of a backward table visits: its outer block, with a masked entry or the start of a full
    block.
    """
    rows = []
    for w in range(table.blocks):
        index, runs_at, runs, full, masked_at, masked = table.numbers[16 * w : 16 * w + 6]
        pairs = [table.numbers[runs_at + 2 * r : runs_at + 2 * r + 2] for r in range(runs)]
        starts = [start + 64 * i for start, count in pairs for i in range(count)]
        entries = [table.numbers[masked_at + 8 * i : masked_at + 8 * i + 8] for i in range(masked)]
        assert len(starts) == full + masked
        assert starts[:masked] == [entry[0] for entry in entries]
        rows.append([(index, *entry) for entry in entries] + [(index, start) for start in starts[masked:]])
    return rows


def test_backward_table_splits_long_blocks_to_add_gradients():
    n, sinks = 8192, 128
    tiles = Tiles([Tile(0, n, sinks, n, 0, 255), Tile(0, n, 0, sinks, 0, n)])
    written, added = (visits(backward_table(tiles, n, 64, 128, every_block_of=keys)) for keys in (n, 0))
    assert max(map(len, written)) == 128, "the sinks' queries"
    assert max(map(len, added)) <= 64
    assert sorted(chain(*written)) == sorted(chain(*added)), "the same, no more and no less"
    assert not backward_table(Tiles([Tile(0, n, 0, n, 0, n)]), n, 64, 128).long, "causal: twice the average"


def test_parts_of_long_block_finish_together():
    for heads, parts in ((32, 4), (8, 16), (40, 13), (1, 32)):
        (_, rest), (_, divided) = writing_cuts(mask_tiles("sink:64:1024", 16384), pass_sizes(16384, heads))
        assert divided.blocks == parts
        waves = -(-parts * heads // 132)
        least = max(8, divided.total * heads / 132)  # query blocks that each multiprocessor must visit
        assert waves * divided.longest < 1.2 * least
        assert rest.longest == 18


def test_backward_table_starts_blocks_after_excluded_keys():
    """This also holds if only a few keys follow."""
    tiles = Tiles([Tile(0, 900, 0, 300, -900, 900), Tile(0, 900, 500, 700, 0, 900)])
    table = backward_table(tiles, 900, 64, 128, 900, excluded=(300, 500))
    spans = sorted(tuple(table.numbers[16 * w : 16 * w + 7 : 6]) for w in range(table.blocks))
    assert spans == [(0, 128), (128, 256), (256, 300), (500, 628), (628, 756), (756, 884), (884, 900)]


def test_tables_start_blocks_at_long_documents():
    tiles = Tiles([Tile(a, b, a, b, 0, b - a - 1) for a, b in ((0, 90), (90, 1114), (1114, 1300), (1300, 2000))])
    table = forward_table(tiles, 2000, 128, 128, every_block=True)
    rows = sorted(table.numbers[16 * w : 16 * w + 7] for w in range(table.blocks))
    starts, stops = [row[0] for row in rows], [row[6] for row in rows]
    assert starts == [0, *range(90, 1114, 128), 1114, 1242, *range(1300, 2000, 128)]
    assert stops == [*starts[1:], 2000]
    assert [row[5] for row in rows[1:9]] == [0] * 8, "one masked block, the one that is peeled"
    added, written = (backward_table(tiles, 2000, 64, 128, every_block_of=keys) for keys in (0, 2000))
    assert sorted(added.numbers[16 * w] for w in range(added.blocks)) == starts
    assert sorted(written.numbers[16 * w] for w in range(written.blocks)) == starts


@pytest.mark.parametrize("columns", [2500, 2048])
def test_forward_table_staggers_starts_in_long_boxes(columns):
    """16 keys per block and one block per MiB; blocks cut by a band start like all others."""
    rows = 700
    tiles = Tiles([Tile(0, rows, 0, columns, -columns, rows), Tile(0, 300, columns, columns + 1000, -columns - 500, 0)])
    table, plain = (forward_table(tiles, rows, 16, 16, True, *mebibyte) for mebibyte in ((1,), ()))
    seen = count_visits(table, 16, 16, peel=True, length=4000)
    assert (seen[:rows, : columns + 1000] == dense(tiles, 4000)[:rows, : columns + 1000]).all()
    assert (seen[:rows, columns + 1000 :] == 0).all()
    assert (seen == count_visits(plain, 16, 16, peel=True, length=4000)).all()
    first = [table.numbers[table.numbers[16 * w + 1]] for w in range(table.blocks)]
    at = [table.numbers[16 * w] // 16 for w in range(table.blocks)]
    peeled = 16 * (columns == 2048)  # the first block of a box that needs no mask
    # lower blocks also have a band
    boxes = [(block, start) for block, start in zip(at, first, strict=True) if block > 18]
    assert len(boxes) == 25
    assert all(start == 16 * (block % 32) + peeled for block, start in boxes)
    causal = Tiles([Tile(0, 4096, 0, 4096, 0, 4095)])
    assert forward_table(causal, 4096, 16, 16, True, 1).numbers == forward_table(causal, 4096, 16, 16, True).numbers


def test_forward_table_size_grows_with_border_not_area():
    n = 1 << 17
    table = forward_table(Tiles([Tile(0, n, 0, n, 0, n - 1)]), n, 128, 128, every_block=True)
    assert len(table.numbers) <= (16 + 2) * (n // 128)


@pytest.mark.parametrize("size", [(8, 16), (128, 128), (192, 128)], ids=str)
def test_forward_tables_equal_random_masks(size: tuple[int, int]) -> None:
    """Small blocks show off-by-one edges more often."""
    for seed in range(LISTS):
        tiles, seen = random_tiles(seed)
        rows, columns = seen.shape
        for every_block in (False, True):
            table = forward_table(tiles, rows, *size, every_block)
            found = count_visits(table, *size, peel=True, length=LENGTH)
            assert (found[:rows, :columns] == seen).all(), seed
            assert not found[:rows, columns:].any(), seed


@pytest.mark.parametrize("size", [(8, 16), (64, 128), (128, 128)], ids=str)
def test_backward_tables_equal_random_masks(size: tuple[int, int]) -> None:
    for seed in range(LISTS):
        tiles, seen = random_tiles(seed)
        rows, columns = seen.shape
        for every_block_of in (0, columns):
            table = backward_table(tiles, rows, *size, every_block_of)
            runs = [table.numbers[16 * w + 1 : 16 * w + 3] for w in range(table.blocks)]
            assert not any(table.numbers[at + 2 * n] % 4 for at, count in runs for n in range(count)), "as TMA reads"
            found = count_visits(table, *reversed(size), peel=False, length=LENGTH)
            assert (found[:columns, :rows] == seen.T).all(), seed
            assert not found[columns:, :rows].any(), seed
