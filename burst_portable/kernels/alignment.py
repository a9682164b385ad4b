"""Copy tensors whose rows a kernel could not load 16 bytes at once."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

_BYTES = 16


def align_rows(x: Tensor) -> Tensor:
    """Return x if all its rows begin at multiples of 16 bytes, else a copy.

    Args:
        x: Tensor of shape [B, S, H, D], where D is a multiple of 16 bytes.
    """
    if x.data_ptr() % _BYTES == 0 and _are_aligned(x.stride(), _BYTES // x.element_size()):
        return x
    return x.clone(memory_format=torch.contiguous_format)


@lru_cache(maxsize=1024)
def _are_aligned(strides: tuple[int, ...], each: int) -> bool:
    """Return whether every stride is a positive multiple of `each` elements, the last one 1."""
    *steps, last = strides
    return last == 1 and all(step > 0 and step % each == 0 for step in steps)
