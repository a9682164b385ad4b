"""Copies of strided tensors."""

from __future__ import annotations

import torch
from torch import Tensor


def copy(source: Tensor, target: Tensor) -> None:
    """Copy source to target, broadcasting it to the shape of target.

    torch copies strided tensors element by element: on a GPU, elements of 8 bytes take half as long as elements of 2.
    """
    if source.dtype == target.dtype and _is_wide(source) and _is_wide(target):
        source, target = source.view(torch.int64), target.view(torch.int64)
    target.copy_(source)


def _is_wide(x: Tensor) -> bool:
    """Whether it can be viewed as elements of 8 bytes."""
    if x.dim() == 0 or x.stride(-1) != 1:
        return False
    count = 8 // x.itemsize
    # Memory of other packages need not be aligned to 8 bytes, which a GPU requires of such elements.
    return x.data_ptr() % 8 == 0 and not any(n % count for n in (*x.stride()[:-1], x.shape[-1], x.storage_offset()))
