"""List the measured speed of flash-attn-4 relative to `HopperKernel`, and decide which of them computes a call.

Device, versions, date and commands are in benchmarks/README.md.
"""

import math
from itertools import pairwise

FORWARD, BACKWARD = 0, 1

SPEEDS: dict[str, dict[tuple[int, int], tuple[tuple[float, ...], tuple[float, ...]]]] = {
    "full": {
        (32, 32): ((1.28, 1.38, 1.43), (1.21, 1.36, 1.37)),
        (64, 64): ((1.04, 1.03, 1.03), (1.05, 1.04, 1.05)),
        (96, 96): ((1.01, 1.14, 1.20), (1.00, 0.98, 0.99)),
        (128, 128): ((1.02, 1.00, 1.03), (1.03, 1.01, 1.05)),
        (160, 160): ((1.04, 1.03, 0.99), (0.89, 0.93, 0.93)),
        (192, 128): ((1.01, 1.02, 1.03), (1.01, 1.09, 1.08)),
        (192, 192): ((1.04, 1.16, 1.15), (1.03, 1.10, 1.09)),
        (256, 256): ((0.98, 1.01, 0.92), (0.74, 0.78, 0.83)),
    },
    "causal": {
        (32, 32): ((0.49, 1.36, 1.40), (0.56, 1.32, 1.33)),
        (64, 64): ((0.71, 1.08, 1.05), (0.67, 1.06, 1.01)),
        (96, 96): ((0.99, 1.13, 1.15), (0.86, 1.02, 1.02)),
        (128, 128): ((0.98, 1.00, 0.97), (0.87, 1.03, 1.04)),
        (160, 160): ((1.17, 1.01, 1.00), (1.05, 0.96, 0.92)),
        (192, 128): ((1.14, 0.99, 1.03), (1.15, 1.06, 1.05)),
        (192, 192): ((1.22, 1.15, 1.17), (1.19, 1.11, 1.07)),
        (256, 256): ((1.11, 0.99, 0.97), (0.86, 0.71, 0.72)),
    },
    "shared heads": {
        (32, 32): ((0.31, 1.37, 1.43), (0.42, 1.33, 1.34)),
        (64, 64): ((0.34, 1.08, 1.02), (0.44, 1.04, 1.02)),
        (96, 96): ((1.03, 1.14, 1.13), (0.85, 0.99, 0.97)),
        (128, 128): ((1.00, 1.01, 1.00), (0.86, 1.00, 0.96)),
        (160, 160): ((1.08, 1.06, 1.05), (1.02, 0.92, 0.90)),
        (192, 192): ((1.09, 1.15, 1.17), (1.16, 1.06, 1.04)),
        (256, 256): ((1.00, 1.00, 0.93), (0.88, 0.76, 0.76)),
    },
    "softcap": {
        (32, 32): ((0.32, 0.82, 0.85), (0.43, 0.97, 0.97)),
        (64, 64): ((0.41, 0.76, 0.78), (0.49, 0.79, 0.78)),
        (96, 96): ((0.44, 0.79, 0.83), (0.48, 0.83, 0.80)),
        (128, 128): ((0.68, 0.67, 0.65), (0.46, 0.77, 0.76)),
        (160, 160): ((0.81, 0.67, 0.66), (1.13, 1.07, 1.05)),
        (192, 128): ((0.84, 0.68, 0.67), (1.18, 1.07, 1.08)),
        (192, 192): ((0.84, 0.72, 0.73), (1.20, 1.13, 1.13)),
        (256, 256): ((0.88, 0.72, 0.71), (1.01, 0.87, 0.89)),
    },
    "window": {
        (32, 32): ((0.29, 1.18, 1.19), (0.32, 1.31, 1.31)),
        (64, 64): ((0.26, 1.00, 1.00), (0.33, 1.05, 1.05)),
        (96, 96): ((0.34, 0.96, 0.97), (0.45, 1.09, 1.09)),
        (128, 128): ((0.43, 0.97, 0.96), (0.55, 1.07, 1.07)),
        (160, 160): ((1.05, 1.01, 1.02), (1.10, 1.03, 1.02)),
        (192, 128): ((0.98, 0.92, 0.93), (0.95, 1.11, 1.10)),
        (192, 192): ((1.04, 1.05, 1.05), (1.22, 1.13, 1.14)),
        (256, 256): ((0.97, 0.95, 0.95), (0.88, 0.80, 0.78)),
    },
    "documents": {
        (32, 32): ((0.24, 1.18, 1.15), (0.27, 1.37, 1.37)),
        (64, 64): ((0.23, 1.10, 1.05), (0.28, 1.13, 1.15)),
        (96, 96): ((0.25, 1.09, 1.05), (0.44, 1.14, 1.13)),
        (128, 128): ((0.30, 1.02, 0.97), (0.51, 1.12, 1.09)),
        (160, 160): ((1.13, 1.04, 1.00), (1.21, 1.14, 1.14)),
        (192, 128): ((1.16, 1.05, 0.99), (1.06, 1.24, 1.22)),
        (192, 192): ((1.16, 1.13, 1.07), (1.21, 1.26, 1.25)),
        (256, 256): ((1.08, 1.05, 0.98), (0.98, 0.87, 0.86)),
    },
    "documents, shared heads": {
        (32, 32): ((0.0, 1.24), (0.0, 1.13)),
        (64, 64): ((0.0, 1.10), (0.0, 1.09)),
        (96, 96): ((0.0, 1.07), (0.0, 1.02)),
        (128, 128): ((0.0, 0.95), (0.0, 1.02)),
        (160, 160): ((0.0, 1.02), (0.0, 1.27)),
    },
}
"""Speed of flash-attn-4 divided by that of `HopperKernel`, by kind of call, then by sizes of heads and values.

Forward, then backward pass, each with 4,096, 16,384 and 32,768 tokens; 0 was not measured. There were 16 query heads
and, in kinds with shared heads, 4 K/V heads. "shared heads" and "softcap" are causal. Windows have 1,024 tokens,
documents on average. The numbers were cut to two digits. Sizes that are missing were wrong or raised an error. With
4,096 tokens, small numbers are of calls that take longer on the host than on the device.
"""
PAIRS: dict[str, tuple[float, ...]] = {
    "full": (2.68e8, 4.29e9, 1.71e10),
    "causal": (1.34e8, 2.14e9, 8.58e9),
    "shared heads": (1.34e8, 2.14e9, 8.58e9),
    "softcap": (1.34e8, 2.14e9, 8.58e9),
    "window": (5.87e7, 2.60e8, 5.28e8),
    "documents": (4.38e7, 2.87e8, 4.81e8),
    "documents, shared heads": (4.38e7, 2.87e8),
}
"""Visible pairs times query heads of these calls."""
GAIN = 1.01
"""Least speed for which flash-attn-4 is called. A smaller gain is within the noise."""


def is_faster(kind: str, sizes: tuple[int, int], which: int, pairs: float) -> bool:
    """Return whether flash-attn-4 is expected to be faster for a pass.

    The speed is interpolated by the logarithm of the work. From the largest measured call on, it stays the same. Below
    the smallest one, where the host takes longer than the device, flash-attn-4 is not used.

    Args:
        kind: A key of `SPEEDS`.
        sizes: Sizes of heads and values.
        which: `FORWARD` or `BACKWARD`.
        pairs: Visible pairs of all query heads and batch rows.
    """
    if (measured := SPEEDS[kind].get(sizes)) is None or pairs < PAIRS[kind][0]:
        return False
    return _interpolated(PAIRS[kind], measured[which], pairs) >= GAIN


def _interpolated(measured: tuple[float, ...], speeds: tuple[float, ...], pairs: float) -> float:
    """Return the speed for a number of pairs, between those of the measured calls around it."""
    for (few, before), (many, after) in pairwise(zip(measured, speeds, strict=True)):
        if pairs < many:
            return before + math.log(pairs / few) / math.log(many / few) * (after - before)
    return speeds[-1]
