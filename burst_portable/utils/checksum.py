"""Add up the bits of tensors on their device, for checksums. Nothing is read on the host."""

from __future__ import annotations

import torch
from torch import Tensor

INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integer dtypes by size in bytes. A view in one of them shows the bits of another dtype."""
GOLDEN = -7046029254386353131  # 2**64 / golden ratio, as int64
_WIDENED = 1 << 22  # numbers, which are 32 MiB in int64


def position_weights(count: int, device: torch.device) -> Tensor:
    """Return odd pseudo-random int64 numbers, one for each place of a sum that depends on the order of its numbers."""
    weights = torch.arange(1, count + 1, device=device) * GOLDEN
    return ((weights ^ (weights >> 29)) * GOLDEN) | 1


def token_sums(x: Tensor, at_once: int = _WIDENED) -> Tensor:
    """Return the sum of the bits of each token of x ``[B, S, H, D]``: int64 ``[B, S]``. Sums wrap around.

    `at_once`: Largest number of numbers that are converted together, at least those of one token per row.
    """
    bits = _in_words(x.detach())
    tokens = max(1, at_once // bits[:, :1].numel())
    return torch.cat([part.sum(dim=(2, 3), dtype=torch.int64) for part in bits.split(tokens, dim=1)], dim=1)


def _in_words(x: Tensor) -> Tensor:
    """Return a view in the widest possible integers. Those of 8 bytes are added without a copy in int64."""
    is_dense = x.stride(-1) == 1
    for size in (8, 4, 2):
        ratio = size // x.itemsize
        steps = (x.shape[-1], x.storage_offset(), *x.stride()[:-1])
        if ratio == 1 or (ratio > 1 and is_dense and not any(step % ratio for step in steps)):
            return x.view(INTEGERS[size])
    return x.view(torch.uint8)
