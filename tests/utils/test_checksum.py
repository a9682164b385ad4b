"""Test sums of bits: each bit and each place of a token changes them."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from burst_portable.utils.checksum import INTEGERS, position_weights, token_sums

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.uint8)


def exact(x: torch.Tensor, word: int) -> torch.Tensor:
    """Return the sums of the words of each token, in Python's integers."""
    words = x.contiguous().view(INTEGERS[word]).flatten(2).tolist()
    totals = [[sum(token) % 2**64 for token in row] for row in words]
    return torch.tensor([[t - 2**64 if t >= 2**63 else t for t in row] for row in totals])


def numbers(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    found = torch.randint(0, 256, (*shape[:-1], shape[-1] * dtype.itemsize), dtype=torch.uint8)
    return found.view(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("heads", "size"), [(2, 8), (1, 3), (3, 6), (2, 1)])
def test_token_sums_equal_integer_sums(dtype, heads, size):
    """The last size decides the width of the words: 3 numbers of 2 bytes are no whole number of 4 bytes."""
    x = numbers(dtype, 2, 5, heads, size)
    word = max(n for n in (8, 4, 2, 1) if n >= dtype.itemsize and size * dtype.itemsize % n == 0)
    assert torch.equal(token_sums(x), exact(x, word))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_token_sums_change_with_each_bit(dtype):
    x = numbers(dtype, 1, 3, 2, 2)
    before = token_sums(x)
    for byte in range(x.nbytes):
        for bit in range(8):
            changed = x.clone()
            changed.view(-1).view(torch.uint8)[byte] ^= 1 << bit
            differs = token_sums(changed) != before
            assert differs.sum() == 1
            assert differs[0, byte // (x.nbytes // 3)]


@pytest.mark.parametrize(
    ("index", "word"),
    [
        (np.s_[..., :8], 8),
        (np.s_[..., 4:12], 8),
        (np.s_[:, 1:, ::2, 2:10], 4),
        (np.s_[..., 2:8], 4),
        (np.s_[..., 1:9], 2),
        (np.s_[..., ::2], 2),
    ],
    ids=str,
)
def test_token_sums_of_views_equal_integer_sums(index, word):
    """An offset or a stride that is no multiple of a word needs narrower ones."""
    x = numbers(torch.bfloat16, 2, 5, 4, 12)[index]
    assert torch.equal(token_sums(x), exact(x, word))
    turned = x.transpose(1, 2)
    assert torch.equal(token_sums(turned), exact(turned, word))


def test_token_sums_convert_few_numbers_at_once():
    """Head sizes that fill no words of 8 bytes need a copy in int64, of a part of the tokens."""
    x = numbers(torch.bfloat16, 2, 11, 3, 5)
    whole = token_sums(x)
    for at_once in (1, 60, 100, 330):
        assert torch.equal(token_sums(x, at_once), whole)


def test_position_weights_are_odd_and_differ():
    weights = position_weights(1000, torch.device("cpu"))
    assert bool((weights % 2 == 1).all())
    assert len(weights.unique()) == 1000
    assert torch.equal(weights[:10], position_weights(10, torch.device("cpu")))
