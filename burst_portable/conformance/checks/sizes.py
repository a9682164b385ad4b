"""Test whole attentions of each size: heads, groups of heads, lengths, batches, strides."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from burst_portable.conformance.base import BackendUnderTest
from burst_portable.conformance.cases import (
    DTYPES,
    LENGTH,
    MEMORY,
    Case,
)
from burst_portable.conformance.checks.comparison import check_of_cases

HEAD_SIZES = (16, 24, 32, 40, 64, 72, 80, 96, 112, 128, 160, 192, 256)
GROUPS = ("4x4", "4x2", "6x3", "6x2", "8x1", "5x5", "1x1")
LENGTHS = (2, 3, 7, 8, 9, 16, 17, 31, 33, 64, 127, 130)


def size_cases(target: BackendUnderTest) -> Iterator[Case]:
    """Yield each size with 16 and with 32 bits, on an uneven number of ranks; few of them for "quick"."""
    quick = target.coverage == "quick"
    for size in (16, 40, 80) if quick else HEAD_SIZES:
        for dtype in (torch.float32,) if quick else DTYPES.values():
            yield Case(ranks=2, heads=f"4x2x{size}x{size}", dtype=dtype, batch=1, length=67, strategy="burst")
    for group in ("6x2",) if quick else GROUPS:
        yield Case(ranks=3, heads=f"{group}x32x32", dtype=torch.float32, mask="full", layout="striped")
        yield Case(ranks=2, heads=f"{group}x32x48", dtype=torch.bfloat16, strategy="burst")
    for length in (3, 17) if quick else LENGTHS:
        for layout in ("zigzag",) if quick else ("contiguous", "zigzag", "striped"):
            for ranks in (3,) if quick else (1, 3, 8):
                yield Case(length=length, layout=layout, ranks=ranks, strategy="burst", heads="4x2x16x16")
    for memory in MEMORY:
        for strategy in ("ring",) if quick else ("ring", "burst", "ulysses"):
            yield Case(ranks=2, memory=memory, strategy=strategy, dtype=torch.float32, length=LENGTH)
    for batch in () if quick else (1, 3, 5):
        yield Case(ranks=2, batch=batch, mask="documents", strategy="burst")


CHECK = check_of_cases("sizes", "dtypes, head sizes, shared K/V heads, ragged lengths, strides", size_cases)
