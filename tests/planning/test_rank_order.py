"""Test which plans use rank order, by layout, mask, options and kernel."""

from __future__ import annotations

import pytest

import burst_portable as bp
from burst_portable.layout import Layout, Segment
from burst_portable.mask import Mask
from burst_portable.planning.call import KernelTraits
from burst_portable.planning.rank_order import keeps_rank_order, with_rank_order
from burst_portable.strategies.registry import make_strategy

USUAL = {"heads": 6, "kv_heads": 6, "head_dim": 64, "mask": "full", "layout": "contiguous"}
MANY = Layout("many", 14, ((Segment(0, 2), Segment(6, 2), Segment(12, 2)), (Segment(2, 4), Segment(8, 4))))
PARTLY = Layout("partly", 12, ((Segment(0, 4, 2),), (Segment(1, 4, 2), Segment(8, 4))))


@pytest.mark.parametrize(
    ("layout", "options", "in_pieces", "kept"),
    [
        ("contiguous", {}, True, True),
        ("zigzag", {}, False, True),  # few segments per rank
        ("zigzag", {}, True, False),
        ("striped", {}, False, True),
        ("striped", {}, True, False),
        (PARTLY, {}, True, False),
        (MANY, {}, False, False),  # on one rank
        ("zigzag", {"ranks_per_node": 2}, False, True),
        (
            "zigzag",
            {"ranks_per_node": 2, "transfer": "direct"},
            False,
            False,
        ),  # natural order omits more rows
        # rows of a node are interleaved with those of other nodes in both orders
        ("striped", {"ranks_per_node": 2}, True, True),
    ],
    ids=str,
)
def test_keeps_rank_order_by_layout_and_kernel(layout, options, in_pieces, kept):
    ranks = 4 if options else 2
    length = layout.length if isinstance(layout, Layout) else 64
    strategy = make_strategy("usp" if options else "ulysses", **options)
    plan = bp.plan(seq_len=length, ranks=ranks, **USUAL | {"layout": layout}, strategy=strategy)
    assert keeps_rank_order(plan, KernelTraits(splits_tiles=in_pieces)) == kept


@pytest.mark.parametrize(
    ("mask", "natural"),
    [("causal", True), ("full", True), ("window:9", False), ("prefix:20", False), ("documents:0,20,64", False)],
)
@pytest.mark.parametrize("groups", [1, 2])
def test_square_kernels_get_sorted_rows_for_causal_and_full(mask, natural, groups):
    strategy = make_strategy("ulysses", head_groups=groups)
    made = bp.plan(seq_len=64, ranks=2, heads=4, mask=mask, layout="zigzag", strategy=strategy)
    as_it_comes = with_rank_order(made, KernelTraits())
    assert as_it_comes is not made
    assert with_rank_order(made, KernelTraits(prefers_square=True)) == (made if natural else as_it_comes)


def test_rows_of_many_segments_are_sorted():
    mask = Mask.documents(tuple(range(0, 65, 8)))
    made = bp.plan(seq_len=64, ranks=2, heads=4, mask=mask, layout="document_zigzag", strategy="ulysses")
    assert with_rank_order(made, KernelTraits()) is made
