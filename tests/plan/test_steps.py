"""Launches and the parts of a step, by themselves."""

from __future__ import annotations

import pytest

from burst_portable.layout import Segment
from burst_portable.mask import Mask
from burst_portable.planning.schedule import BlockTiles, Compute, divided
from burst_portable.planning.tiles import find_tiles


@pytest.mark.parametrize(
    ("mask", "rows", "share", "row"),
    [
        (Mask.causal(), 256, 1 / 3, 128),
        (Mask.causal(), 256, 0.9, 128),  # the last row at which it may be cut
        (Mask.causal(), 1536, 0.5, 1152),  # half of the pairs lie above row 1086
        (Mask.full(), 1536, 1 / 3, 512),
        (Mask.documents((0, 700, 1536)), 1536, 1 / 3, 700),  # 0.41 of the pairs: near enough
        (Mask.documents((0, 450, 800, 1536)), 1536, 1 / 3, 800),  # 0.38 is nearer than 0.23
        (Mask.documents((0, 430, 1536)), 1536, 1 / 3, 1024),  # 0.13 are less than half of that share
        (Mask.documents((0, 1100, 1536)), 1536, 1 / 3, 768),  # 0.86 are more than twice of it
        (Mask.documents((0, 1300, 1536)), 1536, 0.5, 1024),  # 0.97 would leave almost nothing
        (Mask.full(), 128, 0.5, None),
        (Mask.full(), 1536, 0.0, None),
        (Mask.full(), 1536, 1.0, None),
    ],
)
def test_where_a_launch_is_divided(mask, rows, share, row):
    """At a multiple of 128 rows with the share above it, or where a document begins that is near."""
    tiles = find_tiles(mask, [Segment(0, rows)], [Segment(0, rows)])
    parts = divided(Compute((0,), (0,), (BlockTiles(tiles, 0, 0),)), share)
    if row is None:
        assert parts is None
        return
    upper, lower = (part.tiles for part in parts)
    assert (upper.box[:2], lower.box[:2]) == ((0, row), (row, rows))
    assert upper.area + lower.area == mask.area(rows)
