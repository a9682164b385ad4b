"""Test the random numbers of dropout: known answers, another implementation, and their statistics."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from burst_portable.conformance import oracle
from burst_portable.kernels.dropout import philox, positions_of, threshold, weight_factors
from burst_portable.layout import Segment, cut
from burst_portable.planning.call import Dropout
from burst_portable.planning.tiles import Positions, Tile, Tiles

# kat_vectors of Random123 for philox4x32 with 10 rounds: counter, key, words.
KNOWN = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


def numbers(text: str) -> tuple[int, ...]:
    return tuple(int(word, 16) for word in text.split())


@pytest.mark.parametrize(("counter", "key", "words"), KNOWN)
def test_philox_gives_known_answers(counter, key, words):
    """The oracle of the conformance suite gives them too."""
    found = philox([torch.tensor(word) for word in numbers(counter)], numbers(key))
    assert tuple(map(int, found)) == numbers(words)
    assert tuple(map(int, oracle.philox(np.array(numbers(counter)), numbers(key)))) == numbers(words)


@pytest.mark.parametrize("settings", [Dropout(0.3), Dropout(0.5, 7, (1 << 63) - 1), Dropout(0.999, 1, 1 << 32)])
def test_weight_factors_equal_oracle_at_any_positions(settings):
    """Positions are in any order and far apart; the oracle has no positions."""
    rows, columns = torch.tensor([31, 0, 5, 6], dtype=torch.int32), torch.tensor([9, 8, 40, 3, 2], dtype=torch.int32)
    found = weight_factors(settings, rows, columns, 2, 3)
    exact = oracle.dropout_factors(settings, 2, 3, 32, 41)[:, :, rows.long()][..., columns.long()]
    assert found.dtype == torch.float64
    assert torch.equal(found, exact)


def test_share_of_kept_weights_is_as_requested():
    """Standard deviations of the share: 6 of them are exceeded once in 1e9 seeds."""
    for p in (0.1, 0.5, 0.9):
        factors = weight_factors(Dropout(p, seed=11), torch.arange(128), torch.arange(256), 2, 2)
        kept = (factors > 0).double()
        assert abs(kept.mean() - (1 - p)) < 6 * (p * (1 - p) / kept.numel()) ** 0.5
        assert factors.unique().tolist() == [0.0, 1 / (1 - p)]


def test_masks_of_heads_rows_columns_and_seeds_are_independent():
    """The correlation of two independent masks of n weights has a standard deviation of n ** -0.5."""
    near, other = (weight_factors(Dropout(0.5, seed=s), torch.arange(129), torch.arange(256), 2, 2) for s in (1, 2))
    signs, others = near - 1, other - 1  # -1 or 1
    pairs = {
        "batch": (signs[1:], signs[:-1]),
        "heads": (signs[:, 1:], signs[:, :-1]),
        "rows": (signs[:, :, 1:], signs[:, :, :-1]),
        "seeds": (signs, others),
        **{f"columns {n}": (signs[..., n:], signs[..., :-n]) for n in (1, 2, 3, 4)},
        "row and column": (signs[..., :129], signs[..., :129].mT),
    }
    for name, (one, two) in pairs.items():
        same = one.shape[-1] if name == "row and column" else 0  # the diagonal equals itself
        total = (one * two).sum() - same * one.shape[0] * one.shape[1]
        assert abs(total) < 6 * one.numel() ** 0.5 * (2 if same else 1), name


def test_threshold_has_32_bits():
    assert threshold(0.5) == 1 << 31
    assert threshold(1e-12) == 0
    assert threshold(1 - 1e-12) == (1 << 32) - 1


def test_positions_follow_parts_of_a_block():
    """`Tiles.in_rows` counts rows from another one, whose position they keep."""
    rows, columns = Positions([Segment(3, 4, 5), Segment(40, 3)]), Positions([Segment(0, 6, 2)])
    tiles = Tiles([Tile(0, 7, 0, 6, -9, 9)], (rows, columns))
    listed = [p for s in rows for p in s.positions()]
    assert [p.tolist() for p in positions_of(tiles, torch.device("cpu"))] == [listed, [0, 2, 4, 6, 8, 10]]
    for start, stop in ((0, 7), (2, 6), (5, 7), (3, 3)):
        assert [p for s in cut(rows, start, stop) for p in s.positions()] == listed[start:stop]
        if start < stop:
            part = tiles.in_rows(start, stop)
            assert positions_of(part, torch.device("cpu"))[0].tolist() == listed[start:stop]
