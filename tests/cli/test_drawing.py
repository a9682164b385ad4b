"""Test the shades and labels of drawn score matrices."""

from __future__ import annotations

import pytest

from burst_portable.cli.drawing import Cell, ranks_text


def test_cell_shade_shows_visible_share():
    seen = (0.0, 0.01, 0.33, 0.34, 0.66, 0.67, 0.99, 1.0)
    assert [Cell(None, share).shade for share in seen] == ["· ", "░░", "░░", "▒▒", "▒▒", "▓▓", "▓▓", "██"]


@pytest.mark.parametrize(
    ("ranks", "told"),
    [([3], "3"), ([0, 1, 2, 7], "0-2, 7"), ([0, 2, 4, 5, 9, 10], "0, 2, ...")],
)
def test_ranks_text_abbreviates_ranks(ranks, told):
    assert ranks_text(ranks) == told
