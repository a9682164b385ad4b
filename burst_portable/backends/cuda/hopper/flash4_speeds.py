"""List the measured speed of flash-attn-4 relative to `HopperKernel`, and decide which of them computes a call.

Device, versions, date and commands are in benchmarks/README.md.
"""

import math
from itertools import pairwise

FORWARD, BACKWARD = 0, 1

SPEEDS: dict[str, dict[tuple[int, int], tuple[tuple[float, ...], tuple[float, ...]]]] = {
    "full": {
        (32, 32): ((1.32, 1.42, 1.47), (1.11, 1.37, 1.35)),
        (64, 64): ((1.06, 1.06, 1.02), (1.05, 1.04, 1.02)),
        (96, 96): ((1.02, 1.14, 1.22), (1.00, 1.01, 0.92)),
        (128, 128): ((1.00, 1.02, 0.99), (1.03, 1.05, 1.06)),
        (160, 160): ((1.10, 1.03, 1.11), (0.88, 0.94, 0.97)),
        (192, 128): ((1.01, 1.01, 1.01), (0.99, 1.10, 1.12)),
        (192, 192): ((1.07, 1.14, 1.23), (1.00, 1.10, 1.13)),
        (256, 256): ((0.98, 0.97, 0.98), (0.75, 0.77, 0.80)),
    },
    "causal": {
        (32, 32): ((0.35, 1.40, 1.43), (0.50, 1.32, 1.33)),
        (64, 64): ((0.65, 1.05, 1.04), (0.57, 1.06, 1.05)),
        (96, 96): ((0.98, 1.12, 1.12), (0.86, 0.98, 1.03)),
        (128, 128): ((0.97, 0.96, 0.88), (0.87, 1.04, 1.07)),
        (160, 160): ((1.06, 0.99, 1.01), (0.91, 0.98, 0.89)),
        (192, 128): ((0.99, 0.99, 0.97), (0.97, 1.06, 1.03)),
        (192, 192): ((1.02, 1.12, 1.21), (1.01, 1.10, 1.10)),
        (256, 256): ((0.99, 1.01, 1.02), (0.74, 0.71, 0.78)),
    },
    "shared heads": {
        (32, 32): ((0.49, 1.41, 1.43), (0.49, 1.33, 1.34)),
        (64, 64): ((0.97, 1.06, 1.01), (0.62, 1.03, 1.05)),
        (96, 96): ((1.00, 1.14, 1.20), (0.85, 0.99, 0.98)),
        (128, 128): ((0.98, 0.99, 0.99), (0.87, 1.01, 1.05)),
        (160, 160): ((1.09, 1.08, 1.04), (1.01, 0.90, 0.97)),
        (192, 192): ((1.09, 1.13, 1.18), (1.09, 0.99, 1.03)),
        (256, 256): ((0.99, 0.94, 0.95), (0.80, 0.78, 0.82)),
    },
    "softcap": {
        (32, 32): ((0.26, 0.82, 0.86), (0.37, 0.96, 0.98)),
        (64, 64): ((0.41, 0.75, 0.78), (0.39, 0.78, 0.79)),
        (96, 96): ((0.45, 0.81, 0.82), (0.48, 0.83, 0.82)),
        (128, 128): ((0.70, 0.69, 0.66), (0.45, 0.79, 0.78)),
        (160, 160): ((0.69, 0.68, 0.67), (0.95, 1.08, 1.07)),
        (192, 128): ((0.71, 0.66, 0.67), (0.99, 1.07, 1.12)),
        (192, 192): ((0.73, 0.74, 0.74), (1.01, 1.13, 1.15)),
        (256, 256): ((0.74, 0.72, 0.70), (0.86, 0.85, 0.88)),
    },
    "window": {
        (32, 32): ((0.28, 1.16, 1.17), (0.50, 1.32, 1.31)),
        (64, 64): ((0.25, 0.97, 0.98), (0.54, 1.05, 1.05)),
        (96, 96): ((0.41, 0.95, 0.96), (0.41, 1.09, 1.09)),
        (128, 128): ((0.48, 0.94, 0.93), (0.50, 1.07, 1.08)),
        (160, 160): ((0.99, 0.98, 0.98), (0.85, 1.03, 1.03)),
        (192, 128): ((0.83, 0.92, 0.92), (0.93, 1.11, 1.11)),
        (192, 192): ((1.00, 1.05, 1.05), (1.11, 1.14, 1.14)),
        (256, 256): ((0.96, 0.95, 0.96), (0.85, 0.80, 0.79)),
    },
    "documents": {
        (32, 32): ((0.30, 1.13, 1.12), (0.36, 1.37, 1.37)),
        (64, 64): ((0.25, 0.99, 0.98), (0.42, 1.10, 1.12)),
        (96, 96): ((0.32, 0.96, 0.93), (0.41, 1.07, 1.10)),
        (128, 128): ((0.35, 0.89, 0.86), (0.40, 1.06, 1.05)),
        (160, 160): ((0.96, 0.93, 0.92), (0.75, 1.06, 1.08)),
        (192, 128): ((0.79, 0.94, 0.93), (0.62, 1.15, 1.17)),
        (192, 192): ((0.72, 1.01, 1.02), (0.74, 1.17, 1.17)),
        (256, 256): ((0.98, 0.95, 0.94), (0.85, 0.82, 0.84)),
    },
    "documents, shared heads": {
        (32, 32): ((0.29, 1.22, 1.20), (0.42, 1.05, 1.09)),
        (64, 64): ((0.30, 1.07, 1.06), (0.35, 0.88, 0.89)),
        (96, 96): ((0.33, 1.02, 1.03), (0.52, 1.02, 1.08)),
        (128, 128): ((0.31, 0.90, 0.90), (0.51, 1.03, 1.10)),
        (160, 160): ((0.47, 0.99, 1.01), (1.16, 1.27, 0.98)),
        (192, 192): ((0.33, 1.06, 1.07), (1.07, 1.23, 1.10)),
        (256, 256): ((0.97, 0.99, 1.00), (0.97, 0.91, 0.81)),
    },
}
"""Speed of flash-attn-4 divided by that of `HopperKernel`, by kind of call, then by sizes of heads and values.

Forward, then backward pass, each with 4,096, 16,384 and 32,768 tokens. There were 16 query heads and, in kinds with
shared heads, 4 K/V heads. "shared heads" and "softcap" are causal. Windows have 1,024 tokens, documents on average.
The numbers were cut to two digits. Our backward pass with 4 K/V heads became faster later, which is counted. Sizes
that are missing were wrong or raised an error. With 4,096 tokens, small numbers are of calls that take longer on the
host than on the device.
"""
PAIRS: dict[str, tuple[float, ...]] = {
    "full": (2.68e8, 4.29e9, 1.71e10),
    "causal": (1.34e8, 2.14e9, 8.58e9),
    "shared heads": (1.34e8, 2.14e9, 8.58e9),
    "softcap": (1.34e8, 2.14e9, 8.58e9),
    "window": (5.87e7, 2.60e8, 5.28e8),
    "documents": (4.38e7, 2.87e8, 4.81e8),
    "documents, shared heads": (4.38e7, 2.87e8, 4.81e8),
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
