"""What was measured, by machine: kernels in benchmarks/results, links on eight H200.

Links: GB/s a rank, ten messages back to back, the slowest rank; NVLink through switches, NCCL 2.28.9, torch 2.11.0.
"""

from __future__ import annotations

from dataclasses import replace

from burst_portable.backends.base import Curve, Rates

MIB = 1 << 20
# bf16, S 16384, D 128, causal, the hopper kernel: benchmarks/results/attention-h100-all-2026-11-21.json. What a launch
# costs besides is what S 4096 takes longer than at that rate, full and causal alike.
_HOPPER = Rates(
    tflops=700.0,
    backward=560.0,
    gbps=150.0,
    launch_latency=30e-6,
    backward_launch_latency=110e-6,
    source="one H100",
)
_NCCL_TWO: Curve = ((8 * MIB, 164.0), (64 * MIB, 266.0), (256 * MIB, 307.0))
_NCCL_EIGHT: Curve = ((8 * MIB, 63.0), (64 * MIB, 79.0), (256 * MIB, 295.0))
_PEER_COPY: Curve = ((8 * MIB, 318.0), (64 * MIB, 377.0), (256 * MIB, 388.0))


def rates_of_machine(name: str, ranks: int) -> Rates | None:
    """By the name that the driver has for the GPU; None for one on which nothing was measured."""
    if "H200" in name:  # the same chip as an H100, with more memory
        link = _NCCL_TWO if ranks <= 2 else _NCCL_EIGHT
        return replace(_HOPPER, link=link, direct=_PEER_COPY, source="an H100's kernels and links of H200")
    return _HOPPER if "H100" in name else None
