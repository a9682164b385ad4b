"""List the measured speed of flash-attn-4 relative to `HopperKernel`, and decide which of them computes a call.

Device, versions, date and commands are in benchmarks/README.md.
"""

import math

FORWARD, BACKWARD = 0, 1

SPEEDS: dict[str, dict[tuple[int, int], tuple[tuple[float, float], tuple[float, float]]]] = {
    "full": {
        (32, 32): ((1.29, 1.39), (1.37, 1.37)),
        (64, 64): ((1.05, 1.03), (1.07, 1.08)),
        (96, 96): ((1.02, 1.10), (0.99, 0.97)),
        (128, 128): ((1.02, 0.98), (1.03, 1.00)),
        (160, 160): ((1.03, 1.00), (0.87, 0.95)),
        (192, 128): ((1.01, 1.03), (0.98, 1.09)),
        (192, 192): ((0.98, 1.01), (1.01, 1.09)),
        (256, 256): ((0.98, 0.98), (0.71, 0.71)),
    },
    "causal": {
        (32, 32): ((0.57, 1.36), (0.58, 1.35)),
        (64, 64): ((1.00, 1.09), (0.89, 1.06)),
        (96, 96): ((0.99, 1.15), (0.85, 1.01)),
        (128, 128): ((1.00, 1.01), (0.86, 1.00)),
        (160, 160): ((1.15, 0.99), (1.05, 0.96)),
        (192, 128): ((1.14, 1.01), (1.14, 1.09)),
        (192, 192): ((1.19, 1.12), (1.18, 1.08)),
        (256, 256): ((1.11, 0.99), (0.85, 0.72)),
    },
    "shared heads": {
        (32, 32): ((1.23, 1.36), (1.11, 1.33)),
        (64, 64): ((0.42, 1.09), (0.55, 1.03)),
        (96, 96): ((1.00, 1.13), (0.86, 0.98)),
        (128, 128): ((1.00, 1.03), (0.85, 0.98)),
        (160, 160): ((1.04, 1.08), (1.02, 0.90)),
        (192, 192): ((1.07, 1.15), (1.16, 1.05)),
        (256, 256): ((0.98, 1.05), (0.88, 0.73)),
    },
    "softcap": {
        (32, 32): ((0.42, 0.83), (0.82, 1.00)),
        (64, 64): ((0.41, 0.76), (0.65, 0.78)),
        (96, 96): ((0.46, 0.83), (0.71, 0.86)),
        (128, 128): ((0.69, 0.68), (0.65, 0.75)),
        (160, 160): ((0.82, 0.67), (1.10, 1.04)),
        (192, 128): ((0.83, 0.69), (1.18, 1.11)),
        (192, 192): ((0.84, 0.72), (1.19, 1.09)),
        (256, 256): ((0.84, 0.68), (1.02, 0.88)),
    },
    "window": {
        (32, 32): ((0.26, 1.19), (0.36, 1.29)),
        (64, 64): ((0.24, 1.01), (0.35, 1.04)),
        (96, 96): ((0.32, 0.96), (0.49, 1.06)),
        (128, 128): ((0.40, 0.97), (0.52, 1.03)),
        (160, 160): ((1.04, 1.01), (1.00, 1.03)),
        (192, 128): ((0.98, 0.93), (1.17, 1.11)),
        (192, 192): ((1.02, 1.02), (1.21, 1.14)),
        (256, 256): ((0.96, 0.94), (0.90, 0.83)),
    },
    "documents": {
        (32, 32): ((0.22, 1.18), (0.24, 1.35)),
        (64, 64): ((0.27, 1.09), (0.24, 1.12)),
        (96, 96): ((0.28, 1.09), (0.46, 1.13)),
        (128, 128): ((0.71, 1.02), (0.61, 1.11)),
        (160, 160): ((1.10, 1.02), (0.93, 1.14)),
        (192, 128): ((1.17, 1.07), (0.74, 1.24)),
        (192, 192): ((1.10, 1.13), (0.93, 1.27)),
        (256, 256): ((1.06, 1.01), (0.97, 0.86)),
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

Forward, then backward pass, each with 4,096 and 16,384 tokens; 0 was not measured. There were 16 query heads and, in
kinds with shared heads, 4 K/V heads. "shared heads" and "softcap" are causal. Windows have 1,024 tokens, documents on
average. The numbers were cut to two digits. Sizes that are missing were wrong or raised an error.
"""
PAIRS = {
    "full": (2.68e8, 4.29e9),
    "causal": (1.34e8, 2.14e9),
    "shared heads": (1.34e8, 2.14e9),
    "softcap": (1.34e8, 2.14e9),
    "window": (5.87e7, 2.60e8),
    "documents": (4.38e7, 2.87e8),
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
    if (measured := SPEEDS[kind].get(sizes)) is None:
        return False
    (few, many), (short, long) = PAIRS[kind], measured[which]
    if pairs < few:
        return False
    part = min(1.0, math.log(pairs / few) / math.log(many / few))
    return short + part * (long - short) >= GAIN
