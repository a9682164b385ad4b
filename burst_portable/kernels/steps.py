"""Rows that begin at multiples of 16 bytes.

Kernels that load so much at once, or through hardware descriptors, take that for granted. Users' tensors need not lie
so: a slice of an odd width, a gradient that is repeated along an axis.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

_BYTES = 16


def in_steps(x: Tensor) -> Tensor:
    """[B, S, H, D], D a multiple of 16 bytes, all of whose rows begin at such multiples: `x`, or else a copy of it."""
    if x.data_ptr() % _BYTES == 0 and _even(x.stride(), _BYTES // x.element_size()):
        return x
    return x.clone(memory_format=torch.contiguous_format)


@lru_cache(maxsize=1024)
def _even(strides: tuple[int, ...], each: int) -> bool:
    """Whether 16 bytes, which hold so many elements, divide every step, and none stays where it is."""
    *steps, last = strides
    return last == 1 and all(step > 0 and step % each == 0 for step in steps)
