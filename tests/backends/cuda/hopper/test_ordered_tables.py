"""Test the ordered launch tables against dense masks, and the order of their additions."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from burst_portable.backends.cuda.hopper.block_tables import LaunchTable
from burst_portable.backends.cuda.hopper.cuts import PassSizes, adding_cuts, writing_cuts
from burst_portable.backends.cuda.hopper.ordered_tables import (
    align_queries,
    divided_table,
    ordered_table,
    query_starts,
)
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
    walked,
)

pytest.importorskip("triton")


def check_order(table: LaunchTable, inner: int, starts: Sequence[int] = (0,), rows: int = SEQ) -> None:
    """Check that each visit of an inner block passes the turn to the next one, and that every row is written before.

    A row is written if it is cleared, or if the first visit of its block may write it. Only visits of one document may
    write its rows. `starts` are the first rows of the documents.
    """
    turn, written = list(table.turns), np.zeros(rows + inner, dtype=bool)
    for start, stop in table.cleared:
        written[start:stop] = True
    for number in range(table.blocks):
        runs_at, runs = table.numbers[16 * number + 1 : 16 * number + 3]
        turns_at = table.numbers[16 * number + 7]
        for r in range(runs):
            start, count = table.numbers[runs_at + 2 * r : runs_at + 2 * r + 2]
            first, mine, following, begins = table.numbers[turns_at + 4 * r : turns_at + 4 * r + 4]
            origin = max(at for at in starts if at <= start)
            end = min([at for at in starts if at > start], default=rows + inner)
            assert (start - origin) % inner == 0, "a visit touches one inner block of its document"
            assert mine % table.blocks == number
            for block in walked(count):
                at = start + block * inner
                assert turn[first + block] == mine, (number, block)
                assert following != mine, "a visit before may not be over"
                turn[first + block] = following
                assert not begins or at + inner <= end, "a block of two documents is written"
                assert begins or written[at : min(at + inner, end, rows)].all(), "a sum without a start"
                assert not begins or not written[at : at + inner].any() or any(a <= at < b for a, b in table.cleared)
                written[at : min(at + inner, end)] = True
    assert set(turn) <= {-1}, turn
    assert written[:rows].all()


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("every_block_of", [0, SEQ])
def test_ordered_table_equals_mask_and_has_order(name, every_block_of):
    table = ordered_table(Tiles(CASES[name]), SEQ, 64, 128, every_block_of)
    seen = count_visits(table, 128, 64, peel=False)
    assert (seen[:SEQ, :SEQ] == dense(Tiles(CASES[name])).T).all()
    assert (seen[SEQ:] == 0).all()
    check_order(table, 64)


@pytest.mark.parametrize("name", CASES)
def test_divided_ordered_table_equals_mask_and_has_order(name):
    table = divided_table(Tiles(CASES[name]), SEQ, 64, 128, fill=(1, 132))
    seen = count_visits(table, 128, 64, peel=False)
    assert (seen[:SEQ, :SEQ] == dense(Tiles(CASES[name])).T).all()
    check_order(table, 64)
    assert sum(count for _, count in table.parts) == table.blocks


@pytest.mark.parametrize("name", CASES)
def test_divided_table_knows_whether_it_visits_a_block_twice(name):
    """Without an order, two visits of a block could add to it in any order."""
    table = divided_table(Tiles(CASES[name]), SEQ, 64, 128, fill=(1, 132))
    numbers = table.numbers
    visited = [
        numbers[numbers[16 * row + 7] + 4 * r] + i
        for row in range(table.blocks)
        for r in range(numbers[16 * row + 2])
        for i in walked(numbers[numbers[16 * row + 1] + 2 * r + 1])
    ]
    assert table.visits_once == (len(visited) == len(set(visited)))


DOCUMENTS = Tiles([Tile(at, stop, at, stop, 0, stop) for at, stop in ((0, 333), (333, 650), (650, 700), (700, 1000))])


def test_ordered_blocks_start_at_long_documents():
    starts = query_starts(DOCUMENTS, 1000, 64)
    assert starts == (0, 332, 700), "not at a short document, and at multiples of 4"
    table = ordered_table(DOCUMENTS, 1000, 64, 128, 1000, starts=starts)
    assert table.cleared == ((320, 332), (332, 396), (652, 700), (700, 764)), "blocks at the borders of documents"
    check_order(table, 64, starts, 1000)
    aligned = ordered_table(DOCUMENTS, 1000, 64, 128, 1000)
    assert table.total < aligned.total


def test_query_starts_are_where_no_tile_continues():
    window = Tile(0, 4096, 0, 4096, 0, 1023)
    sink = Tile(1100, 4096, 0, 64, -4096, 4096)
    assert query_starts(Tiles([window, sink]), 4096, 64) == (0,)


@pytest.mark.parametrize(
    ("mask", "inner", "at"),
    [
        ("sink:64:256", 128, 64),
        ("sink:4:256", 64, 4),
        ("sink:70:250", 128, 68),  # down to a multiple of 4
        ("sink:6:256", 64, 0),
        ("sink:64:256", 64, 0),
        ("sink:2:256", 64, 0),
        ("sink:64:300", 128, 0),  # no visit less
        ("window:300", 128, 0),
        ("causal", 64, 0),
        ("prefix:70", 64, 0),
        ("documents:0,333,1000", 64, 333),  # as `query_starts`
        ("documents:0,10,130,260,390,520,650,780,910,1000", 64, 0),  # no tile has most pairs
    ],
)
def test_queries_align_with_keys_after_sinks(mask, inner, at):
    tiles = mask_tiles(mask, 1000)
    divided, starts = align_queries(tiles, 1000, inner, 128)
    assert starts == ((0, at - at % 4) if at else (0,))
    assert divided.num_pairs == tiles.num_pairs
    table = ordered_table(divided, 1000, inner, 128, 1000, starts=starts)
    seen = count_visits(table, 128, inner, peel=False, length=1000)
    assert (seen[:1000, :1000] == dense(tiles, 1000).T).all()
    assert (seen[1000:] == 0).all()
    check_order(table, inner, starts, 1000)
    if at and not mask.startswith("documents"):
        assert table.total < ordered_table(tiles, 1000, inner, 128, 1000).total


@pytest.mark.parametrize("inner", [64, 128])
@pytest.mark.parametrize("sinks", [1, 4, 16, 63, 64, 65, 100, 127, 128, 131, 200])
@pytest.mark.parametrize("window", [1, 30, 128, 300])
def test_aligned_tables_of_sinks_equal_mask(inner, sinks, window):
    tiles = mask_tiles(f"sink:{sinks}:{window}", 701)
    divided, starts = align_queries(tiles, 701, inner, 128)
    table = ordered_table(divided, 701, inner, 128, 701, starts=starts)
    seen = count_visits(table, 128, inner, peel=False, length=701)
    assert (seen[:701, :701] == dense(tiles, 701).T).all()
    check_order(table, inner, starts, 701)


def test_check_order_finds_visit_that_writes_a_shared_block():
    """A first visit that writes a block with rows of two documents would erase sums of the second one."""
    starts = query_starts(DOCUMENTS, 1000, 64)
    table = ordered_table(DOCUMENTS, 1000, 64, 128, 1000, starts=starts)
    shared = 320
    for number in range(table.blocks):
        runs_at, runs = table.numbers[16 * number + 1 : 16 * number + 3]
        for r in range(runs):
            if table.numbers[runs_at + 2 * r] == shared:
                table.numbers[table.numbers[16 * number + 7] + 4 * r + 3] = 1
    with pytest.raises(AssertionError, match="two documents"):
        check_order(table, 64, starts, 1000)


def test_check_order_finds_wrong_next_visitor():
    table = ordered_table(Tiles(CASES["causal"]), SEQ, 64, 128)
    table.numbers[table.numbers[7] + 2] += 1
    with pytest.raises(AssertionError):
        check_order(table, 64)


def ordered_rows(mask: str, length: int, heads: int = 16) -> tuple[LaunchTable, list[int], list[bool], list[bool]]:
    """Return a table, and of each row its key block, if it begins where no earlier one has been, and if it falls."""
    (_, table), *_ = writing_cuts(mask_tiles(mask, length), pass_sizes(length, heads), ordered=True)
    rows = [table.numbers[16 * n : 16 * n + 8] for n in range(table.blocks)]
    begins = [table.turns[table.numbers[row[7]]] == number for number, row in enumerate(rows)]
    falls = [table.numbers[row[1] + 1] < 0 for row in rows]
    return table, [row[0] // 128 for row in rows], begins, falls


@pytest.mark.parametrize("mask", ["causal", "window:1024", "documents:0,1024,2048,6144,8192", "prefix:5000"])
def test_ordered_rows_fall_and_long_ones_come_first(mask):
    table, keys, _, falls = ordered_rows(mask, 8192)
    assert all(falls)
    assert list(table.lengths) == sorted(table.lengths, reverse=True)
    assert all(table.lengths[i] > table.lengths[i + 1] or keys[i] < keys[i + 1] for i in range(len(keys) - 1))


def test_ordered_rows_of_window_begin_where_no_other_has_been():
    table, keys, begins, _ = ordered_rows("window:1024", 8192)
    whole = [
        n for n, key in enumerate(keys) if key < 64 - 1024 // 128
    ]  # the window of later keys ends with the queries
    assert all(begins[n] for n in whole)
    assert table.together == 9 / 64


@pytest.mark.parametrize(("mask", "together"), [("causal", 1.0), ("full", 1.0), ("documents:0,1024,3072,4096", 1 / 2)])
def test_ordered_rows_that_begin_together_are_counted(mask, together):
    assert ordered_rows(mask, 4096)[0].together == together


def test_ordered_row_of_sinks_comes_first_and_others_follow_it():
    table, keys, _, falls = ordered_rows("sink:64:1024", 4096)
    assert keys == [0, *range(31, -1, -1)], "the sinks have a row of their own"
    assert falls == [True] + [False] * 32
    assert table.follows
    assert not ordered_rows("window:1024", 4096)[0].follows


def test_heads_that_follow_a_row_of_sinks_have_separate_programs():
    """One program of a group would visit the sinks' queries of all its heads before others could begin the last one."""
    sizes = PassSizes(1, 4096, 4096, 32, 8, 64, 64, processors=132)
    ((cut, table),) = writing_cuts(mask_tiles("sink:64:1024", 4096), sizes, ordered=True)
    assert cut.separate
    assert table.longest == 33
    ((cut, _),) = writing_cuts(mask_tiles("window:1024", 4096), sizes, ordered=True)
    assert not cut.separate


@pytest.mark.parametrize("writes", [True, False])
def test_ordered_cuts_divide_sinks_and_keep_windows_whole(writes):
    sizes, make = pass_sizes(16384, 16, group=4), writing_cuts if writes else adding_cuts
    (whole, rest), (apart, divided) = make(mask_tiles("sink:64:1024", 16384), sizes, ordered=True)
    assert (whole.span, whole.keys, whole.separate) == (4, None, False)
    assert (apart.span, apart.keys, apart.separate) == (1, (0, 64), True)
    assert not apart.ordered, "it adds once to each block of dQ"
    assert rest.longest <= 18
    assert divided.parts == (((0, 64), divided.blocks),)
    assert divided.longest <= 32 < divided.total
    outs = [divided.numbers[16 * n + i] for n in range(divided.blocks) for i in (9, 6)]
    assert outs == [128 * (n + i) for n in range(divided.blocks) for i in (0, 1)]
    ((window, _),) = make(mask_tiles("window:1024", 16384), sizes, ordered=True)
    assert (window.span, window.separate) == (4, False)


@pytest.mark.parametrize(("length", "separate"), [(16384, True), (1 << 18, False)])
def test_ordered_cut_by_query_head_takes_bounded_memory(length, separate):
    ((cut, _),) = adding_cuts(mask_tiles("causal", length), pass_sizes(length, 16, group=4), ordered=True)
    assert cut.separate is separate


def test_second_ordered_launch_of_two_key_blocks_has_an_order():
    _, (apart, divided) = writing_cuts(mask_tiles("sink:200:1024", 16384), pass_sizes(16384, 16), ordered=True)
    assert len(divided.parts) == 2
    assert apart.ordered


def test_ordered_table_size_grows_with_border_not_area():
    n = 1 << 17
    for tile in (Tile(0, n, 0, n, 0, n - 1), Tile(0, n, 0, n, 0, 4095), Tile(0, n, 0, n, -n, n)):
        assert len(ordered_table(Tiles([tile]), n, 64, 128, n).numbers) <= 80 * (n // 128)


@pytest.mark.parametrize("size", [(8, 16), (64, 128), (128, 128)], ids=str)
def test_ordered_tables_equal_random_masks(size: tuple[int, int]) -> None:
    for seed in range(LISTS):
        tiles, seen = random_tiles(seed)
        rows, columns = seen.shape
        for every_block_of in (0, columns):
            for starts in ((0,), query_starts(tiles, rows, size[0])):
                table = ordered_table(tiles, rows, *size, every_block_of, starts=starts)
                found = count_visits(table, *reversed(size), peel=False, length=LENGTH)
                assert (found[:columns, :rows] == seen.T).all(), seed
                check_order(table, size[0], starts, rows)
