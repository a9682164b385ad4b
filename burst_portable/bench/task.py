"""Define the sizes of a benchmark and the inputs of one row."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from burst_portable.layout import Layout
from burst_portable.mask import Mask

SEED = 30
"""Seed of dropout."""


@dataclass(frozen=True)
class Setting:
    """Sizes of a benchmark, equal on all ranks."""

    heads: int
    kv_heads: int
    head_dim: int
    dtype: str
    layout: str
    rounds: int
    dropout: float = 0.0


@dataclass(frozen=True)
class Task:
    """One row on one rank: the unsharded tensors that every rank has, and the mask."""

    mask: Mask
    layout: Layout
    kernel: str
    tensors: tuple[Tensor, Tensor, Tensor, Tensor]
    """q, k, v and dO, [1, S, H, D]."""
    dropout: float = 0.0
    """Probability with which a weight of the softmax is dropped."""
