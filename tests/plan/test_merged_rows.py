"""Rows that one computation completes, and those that are merged over several."""

from __future__ import annotations

import pytest

import burst_portable as bp
from burst_portable.planning import schedule as steps
from burst_portable.planning.tiles import Tile, Tiles


def merged(rank, mask, layout, ranks=4, **options):
    made = bp.plan(seq_len=131072, ranks=ranks, heads=8, mask=mask, layout=layout, strategy="ring", **options)
    return made.forward.merged_rows(rank)


@pytest.mark.parametrize(
    ("rank", "mask", "layout", "rows"),
    [
        (0, "window:4096", "contiguous", None),  # computes once
        (1, "window:4096", "contiguous", (0, 4096)),
        (3, "window:1000", "contiguous", (0, 1024)),  # whole blocks of 128
        (1, "window:20000", "contiguous", None),  # most are merged
        (1, "causal", "zigzag", None),  # all are
        (
            1,
            bp.Mask.documents((0, 60000, 70000, 131072)),
            "contiguous",
            None,
        ),  # one document reaches across: nearly all
        (1, bp.Mask.documents((0, 30000, 33000, 65536, 131072)), "contiguous", (0, 256)),  # its last 232 rows
        (0, bp.Mask.documents((0, 32768, 65536, 98304, 131072)), "contiguous", None),  # nothing crosses
    ],
)
def test_which_are_merged(rank, mask, layout, rows):
    assert merged(rank, mask, layout) == rows


def test_every_row_that_a_later_step_names_is_among_them():
    mask = bp.Mask.documents((*range(0, 131072, 5000), 131072))
    for layout in ("contiguous", "whole_documents"):
        plan = bp.plan(seq_len=131072, ranks=4, heads=8, mask=mask, layout=layout, strategy="ring")
        for rank in range(4):
            _, *later = [step.compute for step in plan.forward.steps_of(rank) if step.compute]
            if rows := plan.forward.merged_rows(rank):
                assert all(rows[0] <= t.q_start < t.q_stop <= rows[1] for c in later for t in c.tiles)
                assert later
            elif later:
                named = [row for c in later for t in c.tiles for row in (t.q_start, t.q_stop)]
                assert max(named) - min(named) > plan.layout.count(rank) // 2 - 256


def test_few_rows_are_not_worth_a_launch():
    plan = bp.plan(seq_len=8192, ranks=2, heads=8, mask="window:128", layout="contiguous", strategy="ring")
    assert plan.forward.merged_rows(1) is None
    assert steps.merged_rows(plan.forward.steps_of(1), 5000) == (0, 128)


def test_parts_of_tiles_in_rows():
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
