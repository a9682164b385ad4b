"""Test launches, the parts of a step, and which rows are merged over several computations."""

from __future__ import annotations

import dataclasses

import pytest

import burst_portable as bp
from burst_portable.layout import Segment
from burst_portable.mask import Mask
from burst_portable.planning import schedule as steps
from burst_portable.planning.cost import rank_cost
from burst_portable.planning.hardware import HardwareSpec
from burst_portable.planning.schedule import BlockTiles, Compute, split_compute
from burst_portable.planning.tiles import find_tiles
from burst_portable.planning.verify import verify
from tests.support.plans import make_plan


@pytest.mark.parametrize(
    ("mask", "rows", "share", "row"),
    [
        (Mask.causal(), 256, 1 / 3, 128),
        (Mask.causal(), 256, 0.9, 128),  # the last row at which a split is allowed
        (Mask.causal(), 1536, 0.5, 1152),  # half of the pairs are above row 1086
        (Mask.full(), 1536, 1 / 3, 512),
        (Mask.documents((0, 700, 1536)), 1536, 1 / 3, 700),  # 0.41 of the pairs, which is close enough
        (Mask.documents((0, 450, 800, 1536)), 1536, 1 / 3, 800),  # 0.38 is nearer than 0.23
        (Mask.documents((0, 430, 1536)), 1536, 1 / 3, 1024),  # 0.13 are less than half of that share
        (Mask.documents((0, 1100, 1536)), 1536, 1 / 3, 768),  # 0.86 are more than twice of it
        (Mask.documents((0, 1300, 1536)), 1536, 0.5, 1024),  # 0.97 would leave almost nothing
        (Mask.full(), 128, 0.5, None),
        (Mask.full(), 1536, 0.0, None),
        (Mask.full(), 1536, 1.0, None),
    ],
)
def test_divided_splits_launch_at_block_or_document(mask, rows, share, row):
    """The split is at a multiple of 128 rows above the share, or at a nearby document start."""
    tiles = find_tiles(mask, [Segment(0, rows)], [Segment(0, rows)])
    parts = split_compute(Compute((0,), (0,), (BlockTiles(tiles, 0, 0),)), share)
    if row is None:
        assert parts is None
        return
    upper, lower = (part.tiles for part in parts)
    assert (upper.box[:2], lower.box[:2]) == ((0, row), (row, rows))
    assert upper.num_pairs + lower.num_pairs == mask.num_pairs(rows)


def merged(rank, mask, layout, ranks=4, **options):
    made = bp.plan(seq_len=131072, ranks=ranks, heads=8, mask=mask, layout=layout, strategy="ring", **options)
    return made.forward.merged_rows(rank)


@pytest.mark.parametrize(
    ("rank", "mask", "layout", "rows"),
    [
        (0, "window:4096", "contiguous", None),  # computed once
        (1, "window:4096", "contiguous", (0, 4096)),
        (3, "window:1000", "contiguous", (0, 1024)),  # whole blocks of 128
        (1, "window:20000", "contiguous", None),  # most rows are merged
        (1, "causal", "zigzag", None),  # all rows are merged
        (
            1,
            bp.Mask.documents((0, 60000, 70000, 131072)),
            "contiguous",
            None,
        ),  # one document reaches across, and contains nearly all rows
        (1, bp.Mask.documents((0, 30000, 33000, 65536, 131072)), "contiguous", (0, 256)),  # its last 232 rows
        (0, bp.Mask.documents((0, 32768, 65536, 98304, 131072)), "contiguous", None),  # no document crosses a boundary
    ],
)
def test_merged_rows_of_each_mask_and_layout(rank, mask, layout, rows):
    assert merged(rank, mask, layout) == rows


def test_merged_rows_include_all_rows_of_later_steps():
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


def test_merged_rows_returns_none_for_few_rows():
    plan = bp.plan(seq_len=8192, ranks=2, heads=8, mask="window:128", layout="contiguous", strategy="ring")
    assert plan.forward.merged_rows(1) is None
    assert steps.merged_rows(plan.forward.steps_of(1), 5000) == (0, 128)


def test_local_block_order_last_overlaps_gradients():
    """Rank 0 of 4, full mask: gradients of remote blocks leave during the local block."""
    options = {"mask": Mask.full(), "layout": "contiguous", "transfer": "direct", "prefetch_steps": 3}
    first, last = (make_plan(local_block_order=own, **options) for own in ("first", "last"))
    assert first.forward == last.forward
    steps = last.backward.steps_of(0)
    assert [s.compute.k_owners if s.compute else None for s in steps] == [None, (3,), (2,), (1,), (0,)]
    assert [[m.owner for m in s.result_sends] for s in steps] == [[], [3], [2], [1], []]
    assert [[m.source for m in s.result_arrivals] for s in steps] == [[], [], [1], [2], [3]]
    together = make_plan(local_block_order="last", blocks_per_launch=3, **options).backward.steps_of(0)
    assert [s.compute.k_owners if s.compute else None for s in together] == [None, (1, 2, 3), (0,)]
    # A step takes one second. K and V arrive in half a second, and dK and dV are sent in one second.
    size = rank_cost(first, "forward", 0, HardwareSpec(1, 1)).received / 3
    hardware = HardwareSpec(10 * 16 * 16 * 8 * 64 / 1e12, 2 * size / 1e9, 0.0, 0.0)
    assert rank_cost(first, "backward", 0, hardware).seconds == pytest.approx(5.0, rel=1e-6)
    assert rank_cost(last, "backward", 0, hardware).seconds == pytest.approx(4.5, rel=1e-6)


def test_local_block_order_split_overlaps_both_directions():
    """Rank 0 of 4, full mask: 1/3 of the local block during receives, 2/3 during gradient sends."""
    options = {"mask": Mask.full(), "layout": "contiguous", "length": 4 * 1536, "transfer": "direct"}
    plan = make_plan(local_block_order="split", prefetch_steps=3, blocks_per_launch=3, **options)
    assert verify(plan) == []
    steps = plan.backward.steps_of(0)
    assert [s.compute.k_owners for s in steps] == [(0,), (1, 2, 3), (0,)]
    assert [s.compute.tiles.box for s in steps[::2]] == [(0, 512, 0, 1536), (512, 1536, 0, 1536)]
    assert [len(s.receives) for s in steps] == [3, 0, 0]
    assert [len(s.result_sends) for s in steps] == [0, 3, 0]
    assert [len(s.result_arrivals) for s in steps] == [0, 0, 3]
    # A step with a full block takes one second. K and V of a block take a tenth, and dK and dV a fifth.
    size = rank_cost(plan, "forward", 0, HardwareSpec(1, 1)).received / 3
    hardware = HardwareSpec(10 * 1536 * 1536 * 8 * 64 / 1e12, 10 * size / 1e9, 0.0, 0.0)
    first, last = (
        make_plan(local_block_order=own, prefetch_steps=3, blocks_per_launch=3, **options) for own in ("first", "last")
    )
    took = [rank_cost(one, "backward", 0, hardware).seconds for one in (first, last, plan)]
    assert took == pytest.approx([4.6, 4.3, 4.0], rel=1e-6)


@pytest.mark.parametrize(
    ("mask", "layout", "cuts"),
    [
        (Mask.causal(), "zigzag", [0.34, 0.34, 0.34]),
        # at the start of a document, if there is one
        (Mask.documents((0, 1000, 2200, 4608)), "contiguous", [0.367, 0.34]),
        (Mask.causal(), "contiguous", [0.34, 0.34]),  # rank 0 needs no remote block
        (Mask.window(200), "contiguous", [0.376, 0.376]),
        (Mask.full(), "striped", [0.33, 0.33, 0.33]),
    ],
)
def test_local_block_split_by_mask_and_layout(mask, layout, cuts):
    plan = make_plan(mask, layout, ranks=3, length=3 * 1536, transfer="direct", local_block_order="split")
    assert verify(plan) == []
    found = []
    for rank in range(3):
        parts = [
            s.compute.num_pairs for s in plan.backward.steps_of(rank) if s.compute and s.compute.k_owners == (rank,)
        ]
        if len(parts) > 1:
            found.append(parts[0] / sum(parts))
    assert found == pytest.approx(cuts, abs=0.01)


def test_verify_detects_rows_computed_by_both_parts():
    plan = make_plan(Mask.full(), "contiguous", length=4 * 1536, transfer="direct", local_block_order="split")
    steps = plan.backward.steps_of(1)
    upper = steps[0].compute
    wrong = dataclasses.replace(steps[-1], compute=upper)  # the same rows twice, and as many never
    plan.backward._steps[1] = (*steps[:-1], wrong)
    assert any("computed more than once: [(1, 1)]" in one for one in verify(plan))


def test_local_blocks_of_few_rows_are_not_split():
    plan = make_plan(Mask.causal(), "zigzag", ranks=4, length=64, transfer="direct", local_block_order="split")
    last = make_plan(Mask.full(), "contiguous", ranks=4, length=4 * 128, transfer="direct", local_block_order="split")
    assert verify(plan) == verify(last) == []
    assert [s.compute.k_owners for s in last.backward.steps_of(0) if s.compute][-1] == (0,)
    assert sum(s.compute.k_owners == (0,) for s in last.backward.steps_of(0) if s.compute) == 1
