"""`in_steps`: rows that begin at multiples of 16 bytes, for kernels that load 16 bytes at once.

Users' tensors may lie differently: a slice of an odd width, a gradient that is expanded along an axis.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

_BYTES = 16


def in_steps(x: Tensor) -> Tensor:
    """``[B, S, H, D]``, D a multiple of 16 bytes: `x` itself if all rows begin at such multiples, else a copy."""
    if x.data_ptr() % _BYTES == 0 and _even(x.stride(), _BYTES // x.element_size()):
        return x
    return x.clone(memory_format=torch.contiguous_format)


@lru_cache(maxsize=1024)
def _even(strides: tuple[int, ...], each: int) -> bool:
    """Whether every stride is a positive multiple of `each` elements, the last one 1."""
    *steps, last = strides
    return last == 1 and all(step > 0 and step % each == 0 for step in steps)
