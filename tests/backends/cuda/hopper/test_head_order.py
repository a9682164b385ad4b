"""Test how many heads run at the same time: the predicted ends of launches, and the limits of the L2."""

import random

import pytest

from burst_portable.backends.cuda.hopper.block_tables import LaunchTable
from burst_portable.backends.cuda.hopper.cuts import forward_cut, writing_cuts
from burst_portable.backends.cuda.hopper.head_order import predict_end, side_by_side
from tests.support.launch_tables import mask_tiles, pass_sizes

MEBIBYTE = 1 << 20
PROCESSORS = 132


def table_of(lengths, together=0.0):
    return LaunchTable([], len(lengths), lengths=tuple(lengths), together=together)


def by_hand(lengths, all_heads, side, processors):
    """Return the end of the last program: each starts on the multiprocessor that is idle first."""
    ends = [0] * processors
    for first in range(0, all_heads, side):
        for length in lengths:
            for _ in range(first, first + side):
                at = ends.index(min(ends))
                ends[at] += length + 2
    return max(ends)


@pytest.mark.parametrize("seed", range(5))
def test_predicted_end_is_that_of_programs_in_turn(seed):
    make = random.Random(seed)
    lengths = sorted((make.randint(1, 40) for _ in range(make.randint(1, 30))), reverse=True)
    for side in (1, 2, 4, 8):
        assert predict_end(lengths, 8, side, 7) == by_hand(lengths, 8, side, 7)


def test_long_rows_of_all_heads_start_first():
    """One long row per head, as that of attention sinks: with few heads, that of the last one starts late."""
    sinks = table_of([64, *[18] * 31])
    assert side_by_side(sinks, 1, 16, 1, 16, 2 * MEBIBYTE, PROCESSORS) == 16
    assert predict_end(sinks.lengths, 16, 4, PROCESSORS) > 1.2 * predict_end(sinks.lengths, 16, 16, PROCESSORS)


def test_equal_rows_keep_few_heads_in_the_l2():
    assert side_by_side(table_of([16] * 128), 1, 16, 1, 16, 4 * MEBIBYTE, PROCESSORS) == 2


def test_heads_that_exceed_the_l2_by_far_do_not_run_together():
    sinks = table_of([64, *[18] * 31])
    assert side_by_side(sinks, 1, 16, 1, 16, 16 * MEBIBYTE, PROCESSORS) <= 4
    assert side_by_side(sinks, 1, 16, 1, 16, 100 * MEBIBYTE, PROCESSORS) == 1


def test_rows_that_begin_with_one_block_are_spread_over_heads():
    equal = [16] * 128
    assert side_by_side(table_of(equal, together=1.0), 1, 16, 1, 16, 4 * MEBIBYTE, PROCESSORS) == 16
    assert side_by_side(table_of(equal, together=0.1), 1, 16, 1, 16, 4 * MEBIBYTE, PROCESSORS) == 4


def test_long_launches_are_not_predicted(monkeypatch):
    monkeypatch.setattr("burst_portable.backends.cuda.hopper.head_order.predict_end", None)
    assert side_by_side(table_of(range(1024, 0, -1)), 1, 16, 1, 16, 16 * MEBIBYTE, PROCESSORS) == 1


@pytest.mark.parametrize(("lengths", "times"), [([16, 15] * 66, 1), ([64, *[18] * 31], 3)], ids=["even", "sinks"])
def test_no_more_ends_are_predicted_than_needed(lengths, times, monkeypatch):
    asked = []

    def counted(*arguments):
        asked.append(arguments[2])
        return predict_end(*arguments)

    monkeypatch.setattr("burst_portable.backends.cuda.hopper.head_order.predict_end", counted)
    side_by_side(table_of(lengths), 1, 16, 1, 16, 2 * MEBIBYTE, PROCESSORS)
    assert len(asked) == times, asked


@pytest.mark.parametrize("span", [1, 4])
@pytest.mark.parametrize(("heads", "all_heads", "group"), [(12, 36, 3), (7, 7, 7), (1, 1, 1), (32, 64, 8)])
def test_result_divides_heads(heads, all_heads, group, span):
    for lengths in ([], [3], list(range(40, 0, -1))):
        for read in (0, MEBIBYTE, 40 * MEBIBYTE):
            assert heads % side_by_side(table_of(lengths), span, heads, group, all_heads, read, PROCESSORS) == 0


@pytest.mark.parametrize(("mask", "few", "many"), [("causal", 1, 1), ("sink:64:1024", 1, 2), ("window:1024", 1, 1)])
def test_heads_of_usual_masks(mask, few, many):
    """On one H200, more heads at the same time made documents and sinks faster, and no other mask."""
    sizes, tiles = pass_sizes(16384, 16), mask_tiles(mask, 16384)
    read = sizes.keys * sizes.dim * 4
    for _, table in (forward_cut(tiles, sizes, every_block=True), *writing_cuts(tiles, sizes)):
        found = side_by_side(table, 1, sizes.heads, 1, sizes.all_heads, read, PROCESSORS)
        assert few <= found <= many, table.lengths[:3]
