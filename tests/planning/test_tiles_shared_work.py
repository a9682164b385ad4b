"""Test that plans of one mask share work, and that the results equal those of separate plans."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import burst_portable as bp
from burst_portable.backends.cuda.machines import hardware_of_machine
from burst_portable.layout import NAMES, OF_DOCUMENTS, make_layout
from burst_portable.mask import Mask
from burst_portable.planning import tiles
from burst_portable.planning.call import AttentionCall
from burst_portable.planning.cost import plan_cost
from burst_portable.planning.plans import PASSES
from burst_portable.planning.tiles import Tiles, make_box
from burst_portable.strategies.auto import AutoStrategy
from burst_portable.utils.cache import Cache

HARDWARE = hardware_of_machine("NVIDIA H200", 4)
ENDS = (0, 1300, 1301, 2500, 2720, 3100, 3101, 3950, 4000, 4777)
MASKS = [Mask.documents(ENDS), Mask.documents(ENDS, window=150), Mask.window(700), Mask.share_question([900, 40, 700])]


def problems(mask: Mask, ranks: int):
    length = 4777 if mask.regions[-1].q_stop > 4777 else mask.regions[-1].q_stop
    for name in NAMES:
        if name not in OF_DOCUMENTS or mask is MASKS[0]:
            where = make_layout(name, length, ranks, mask)
            yield AttentionCall(mask, where, 12, 6, 64, 64)


@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_launch_summary_equals_its_tiles(mask):
    """It is computed without shifting tiles, for trimmed blocks and several blocks at once."""
    auto = AutoStrategy(hardware=HARDWARE)
    for problem in problems(mask, 3):
        for label, strategy in auto.list_candidates(problem)[0].items():
            made = strategy.plan(problem)
            computes = [s.compute for name in PASSES for s in made.steps(name, 1)]
            for one in filter(None, computes):
                found = Tiles(one.tiles)
                assert (one.count, one.num_pairs, one.heights, one.columns, one.covered) == (
                    len(found), found.num_pairs, found.heights, found.columns, found.covered
                ), label  # fmt: skip
                assert one.visited(128) == sum(tile.visited(128) for tile in found)
            assert auto.seconds(made) == plan_cost(made, HARDWARE).seconds


def test_tiles_are_found_once_per_layout_and_block_pair(monkeypatch):
    """A mask that changes with each batch is planned before each step."""
    made = []
    fuse = tiles.fuse
    monkeypatch.setattr(tiles, "fuse", lambda found: made.append(len(found)) or fuse(found))
    mask = Mask.documents((0, *range(100, 3000, 70), 3001))
    plan = bp.plan(seq_len=3001, ranks=4, heads=12, mask=mask, layout="auto", strategy=AutoStrategy(hardware=HARDWARE))
    assert "document_zigzag" in plan.reason
    assert len(made) <= 4 * 4 * 4 + 1  # four layouts, and all tokens for Ulysses


class ClearedAtOnce(Cache):
    """A cache that is cleared before the next read, as another thread may do."""

    def __setitem__(self, key, value):
        super().__setitem__(key, value)
        self.clear()


def test_plan_part_survives_cache_clear_by_other_thread():
    part = bp.plan(seq_len=256, ranks=4, heads=2, strategy="ring").forward
    ours = dataclasses.replace(part)
    object.__setattr__(ours, "_steps", ClearedAtOnce(64))
    assert ours.steps_of(2) == part.steps_of(2)


@example([(0, 0, 2, 2, 0, 0), (2, 2, 2, 2, 0, 0)])  # one diagonal
@example([(0, 0, 2, 2, 0, 1), (2, 2, 2, 2, 0, 1)])
@given(st.lists(st.tuples(*[st.integers(0, 12)] * 2, *[st.integers(1, 5)] * 2, *[st.integers(-6, 6)] * 2), max_size=30))
def test_disjoint_pieces_have_no_union(drawn):
    made = [make_box(q, q + rows, k, k + columns, min(a, b), max(a, b)) for q, k, rows, columns, a, b in drawn]
    pieces = sorted(((box, tiles.count_pairs(box)) for box in made if box), key=tiles._corner)
    for index, piece in enumerate(pieces):
        for later in pieces[index + 1 :]:
            if not set(cells(piece[0])) & set(cells(later[0])):
                assert tiles._union_of_two(piece, later) == tiles._union((piece[0], later[0]), piece[1] + later[1])


def cells(box):
    q_start, q_stop, k_start, k_stop, lo, hi = box
    return [(i, j) for i in range(q_start, q_stop) for j in range(k_start, k_stop) if lo <= i - j <= hi]
