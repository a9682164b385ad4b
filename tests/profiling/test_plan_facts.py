"""Test the layouts that a report compares: their imbalance equals that of a plan, and slow ones are left out."""

from __future__ import annotations

from typing import Any

import pytest

import burst_portable as bp
from burst_portable.profiling.plan_facts import layout_imbalances

SIZES: dict[str, Any] = {"seq_len": 256, "ranks": 2, "head_dim": 16, "itemsize": 2}


def test_layout_imbalance_equals_plan():
    for name, told in layout_imbalances(bp.plan(heads=2, **SIZES).call).items():
        plan = bp.plan(layout=name, heads=2, strategy="ring", **SIZES)
        pairs = [sum(s.compute.tiles.num_pairs for s in plan.forward.steps_of(r) if s.compute) for r in range(2)]
        assert told == pytest.approx(2 * max(pairs) / sum(pairs)), name


def test_layout_comparison_of_many_ranks_skips_striped_layout():
    """512 striped ranks have as many segments per rank, which take too long to try."""
    told = layout_imbalances(bp.plan(heads=2, **{**SIZES, "seq_len": 1 << 20, "ranks": 512}).call)
    assert "striped" not in told
    assert (told["contiguous"], told["zigzag"]) == (pytest.approx(2 - 1 / 512, rel=1e-4), 1)
