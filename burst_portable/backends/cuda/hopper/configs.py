"""Define the block sizes of the Hopper kernels by head size.

A config contains the compile-time constants of a kernel. `cuts` chooses the configs of the launches of a pass.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

OUT_16, OUT_32, MERGE_32 = 0, 1, 2
"""Results of the forward kernel: see `forward`, whose import imports Triton."""
DQ, DK, DV = 0, 1, 2
"""The gradient that a launch of `split_backward` computes."""


@dataclass(frozen=True, slots=True)
class ForwardConfig:
    """Compile-time constants of the forward kernel.

    Attributes:
        BN: Keys per block.
        NS: Slots in shared memory for blocks of keys, and the same number for values.
        W: Workers per program. Each is a warpgroup that computes 64 query rows.
        REGS: Registers per worker thread.
        maxnreg: Triton's launch option of this name: maximum number of registers per thread.
        share: Whether the result is staged in the shared memory of the queries. Large heads leave no space for both. A
            float32 result is then written without TMA.
    """

    BN: int
    NS: int
    W: int
    REGS: int
    maxnreg: int
    share: bool = False


@dataclass(frozen=True, slots=True)
class BackwardConfig:
    """Compile-time constants of the backward kernel that computes all gradients in one launch.

    Attributes:
        BM: Queries per block.
        NQ: Slots in shared memory for blocks of queries, and the same number for dO.
        REGS: Registers per worker thread. Each of the two workers computes 64 keys.
        maxnreg: Triton's launch option of this name: maximum number of registers per thread.
        early: 1 to read the row terms before the product to which they are added, 0 to read them after it.
    """

    BM: int
    NQ: int
    REGS: int
    maxnreg: int
    early: int = 0


@dataclass(frozen=True, slots=True)
class SplitConfig:
    """Compile-time constants of the split backward kernel, for the launch of one gradient.

    Attributes:
        BN: Streamed rows per block.
        NX: Slots in shared memory for the streamed rows of the product S: keys or queries.
        NY: Slots in shared memory for the streamed rows of the product dP: values or dO.
        early: Row terms that are read before the products: 0 none, 1 LSE, 2 LSE and delta.
        REGS: Registers per worker thread. Each of the two workers computes 64 rows.
        maxnreg: Triton's launch option of this name: maximum number of registers per thread.
    """

    BN: int
    NX: int
    NY: int
    early: int = 0
    REGS: int = 240
    maxnreg: int = 168


PANELS = ((64, 0), (64, 16), (64, 32), (128, 0), (128, 16), (128, 32), (128, 64), (128, 128))


@cache
def panels(size: int) -> tuple[int, int]:
    """Return the columns of the two panels in which shared memory holds a head of this size. The second may be 0.

    Gluon requires powers of two. TMA reads 0 for columns past the end of a head, and does not write them.
    """
    return next(pair for pair in PANELS if sum(pair) >= size)


@cache
def forward_value_panels(size: int) -> tuple[int, int]:
    """Return the panels of V and out in the forward.

    One product of 128 columns takes less time than two products of 64 and of 16 or 32, because P is read once.
    """
    return (128, 0) if 64 < size <= 128 else panels(size)


FORWARD: dict[tuple[int, int], ForwardConfig] = {
    (128, 128): ForwardConfig(128, 2, 2, 240, 168),
    (160, 160): ForwardConfig(128, 2, 2, 240, 168, share=True),
    (192, 128): ForwardConfig(128, 2, 2, 240, 168, share=True),
    (256, 256): ForwardConfig(64, 2, 2, 240, 168, share=True),
}
"""Forward configs by largest head size and largest value head size. The first entry that holds both sizes is used."""

SPLIT: dict[tuple[int, int], tuple[SplitConfig, SplitConfig, SplitConfig]] = {
    (160, 160): (SplitConfig(64, 3, 3), SplitConfig(64, 3, 3, early=2), SplitConfig(64, 3, 3)),
    (192, 128): (SplitConfig(64, 3, 3), SplitConfig(64, 3, 3, early=1), SplitConfig(128, 2, 2)),
    (192, 192): (SplitConfig(64, 2, 2), SplitConfig(64, 2, 2, early=1), SplitConfig(64, 3, 3)),
    (256, 256): (SplitConfig(64, 2, 1), SplitConfig(64, 2, 1, early=1), SplitConfig(64, 2, 2)),
}
"""Configs for dQ, dK and dV if a head or a value head is larger than 128. The keys are as in `FORWARD`."""


def forward_config(dim: int, value_dim: int) -> ForwardConfig:
    """Return the config of the forward for these sizes of heads and value heads."""
    return next(config for (d, v), config in FORWARD.items() if dim <= d and value_dim <= v)


def backward_config(dim: int, value_dim: int) -> BackwardConfig:
    """Return the config of the backward that computes all gradients in one launch, for sizes up to 128."""
    return next(config for size, config in BACKWARD.items() if max(dim, value_dim) <= size)


def split_configs(dim: int, value_dim: int) -> tuple[SplitConfig, SplitConfig, SplitConfig] | None:
    """Return the configs of the launches for dQ, dK and dV; None if one launch computes all gradients."""
    if max(dim, value_dim) <= max(BACKWARD):
        return None
    return next(configs for (d, v), configs in SPLIT.items() if dim <= d and value_dim <= v)


TALL = {64: ForwardConfig(128, 2, 3, 160, 128)}
"""Forward configs in which three workers share each key block, by head size.

They are faster if query blocks visit many key blocks and there are many query blocks.
"""
BACKWARD = {
    64: BackwardConfig(128, 2, 240, 168),
    96: BackwardConfig(64, 2, 240, 168, early=1),  # +10 % at 80 and +6 % at 96 on one H100; -2 % at 112
    128: BackwardConfig(64, 2, 240, 168),
}
"""Backward configs by the largest size of heads and value heads."""
KEY_BLOCK = 128  # keys per block of the backward
