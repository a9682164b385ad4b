"""What was measured, by machine and kernel, for `auto`: see `planning.hardware.HardwareSpec`.

Kernels: one causal call of bf16 with heads of 128, on an H100 (benchmarks/attention.py, 2026-11-21);
what a launch costs besides is what S 4096 takes longer than at that rate. On H200 at work: between what a plain call
and what whole passes of 32,768 and 131,072 tokens took (benchmarks/ring.py, 2026-11-21).

Links: GB/s per rank, ten messages back to back, the slowest rank; NVLink through switches, NCCL 2.28.9, torch 2.11.0.
"""

from __future__ import annotations

from dataclasses import replace

from burst_portable.backends.base import Curve, HardwareSpec, Peaks

MIB = 1 << 20
_H100 = {
    "hopper": HardwareSpec(690.0, 150.0, launch_latency=30e-6, backward_tflops=598.0, backward_launch_latency=110e-6),
    "triton": HardwareSpec(485.0, 150.0, launch_latency=40e-6, backward_tflops=411.0, backward_launch_latency=175e-6),
    "cudnn": HardwareSpec(618.0, 150.0, launch_latency=50e-6, backward_tflops=537.0, backward_launch_latency=180e-6),
}
_H200 = {
    **_H100,  # the same chip with more memory, and the kernels on four of them at work
    # Several backward launches took 1 to 4 % longer than those of Ulysses, besides what else is predicted of both, on
    # four GPUs.
    "hopper": HardwareSpec(640.0, 150.0, 20e-6, 60e-6, 580.0, 130e-6, multi_launch_efficiency=0.98),
    # Over 131,072 keys it reached 510 to 550 forward, in a ring's steps over 32,768 each 500 to 600, on two and on four
    # (benchmarks/ring.py, 2026-11-22).
    "cudnn": HardwareSpec(585.0, 150.0, 20e-6, 80e-6, 515.0, 180e-6, long_kv_efficiency=(1 << 17, 0.9)),
}
# On two GPUs less: benchmarks/results/strategies-h200x2-2026-11-23.json, runs fair and fair-long.
_IN_TURN_OF_TWO = 0.99
# From each rank to the next, by the number of ranks. Four: the mean of two runs.
_NCCL: dict[int, Curve] = {
    2: ((8 * MIB, 164.0), (64 * MIB, 266.0), (256 * MIB, 307.0)),
    4: ((8 * MIB, 99.0), (64 * MIB, 140.0), (256 * MIB, 286.0)),
    8: ((8 * MIB, 63.0), (64 * MIB, 79.0), (256 * MIB, 295.0)),
}
_PEER_COPY: dict[int, Curve] = {
    4: ((8 * MIB, 234.0), (64 * MIB, 343.0), (256 * MIB, 380.0)),
    8: ((8 * MIB, 318.0), (64 * MIB, 377.0), (256 * MIB, 388.0)),
}
# To all others at once NCCL takes more multiprocessors: its all-to-all on eight H200.
_NCCL_SPREAD: Curve = ((8 * MIB, 122.0), (64 * MIB, 262.0), (256 * MIB, 305.0))
# Where NCCL moves a ring's blocks on four H200, a pass takes so much of its transfers longer than with nothing sent:
# the forward kernel fills all multiprocessors until it ends; the backward one lets go of them block by block.
_NCCL_HOLDS_UP = (0.9, 0.3)
# Where its stream has priority, on two H200 (`burst-portable measure`, 2026-11-22). Programs of hopper's forward make
# way then, and triton's and flash-attn-4's end by themselves; cuDNN's stay, and messages wait for them.
_NCCL_HOLDS_UP_FIRST = {
    "hopper": (0.19, 0.33),
    "hopper+flash-attn-4": (0.19, 0.33),
    "triton": (0.14, 0.56),
    "flash-attn-4": (0.15, 0.16),
    "cudnn": (0.96, 0.92),
}
_BLOCK = 128  # about the rows and columns that our kernels, cuDNN's and flash attention's compute at once
_MEMORY = 3500.0  # GB/s of torch's elementwise operators, of the 4800 that the memory has


def hardware_of_machine(name: str, ranks: int, kernel: str = "hopper") -> HardwareSpec | None:
    """By the name that the driver has for the GPU; None for one on which nothing was measured."""
    kernels = _H200 if "H200" in name else _H100 if "H100" in name else {}
    if not kernels:
        return None
    # "hopper+flash-attn-4" too is predicted with hopper's: a plan's rates are of steps, and those are hopper's.
    hardware = replace(kernels.get(kernel, kernels["hopper"]), block=_BLOCK)
    source = f"of {kernel if kernel in kernels else 'hopper'} on"
    if kernels is _H100:
        return replace(hardware, source=f"{source} one H100")
    return replace(
        hardware,
        multi_launch_efficiency=_IN_TURN_OF_TWO if ranks == 2 else hardware.multi_launch_efficiency,
        p2p_bandwidth=_by_ranks(_NCCL, ranks),
        all_to_all_bandwidth=_NCCL_SPREAD if ranks > 2 else (),
        peer_copy_bandwidth=_by_ranks(_PEER_COPY, ranks),
        comm_slowdown=_NCCL_HOLDS_UP,
        comm_slowdown_high_priority=_NCCL_HOLDS_UP_FIRST.get(kernel or "hopper"),
        memory_bandwidth=_MEMORY,
        source=f"{source} H200 and their links",
    )


def _by_ranks(curves: dict[int, Curve], ranks: int) -> Curve:
    """The curve for this many ranks, or for the next number that was measured."""
    return curves[min((n for n in curves if n >= ranks), default=max(curves))]


# Compared, in November 2026, with public copies of these sheets. Figures "with sparsity" are twice the dense ones. Not
# here for want of a copy, or because copies differ: H100 NVL, H200 NVL, GH200, GB200, B300.
_AMPERE = "NVIDIA A100 data sheet"
_HOPPER = "NVIDIA H100 architecture white paper"
_BY_NAME = {
    "NVIDIA A100-SXM4-40GB": (312.0, 1555.0, _AMPERE),
    "NVIDIA A100-PCIE-40GB": (312.0, 1555.0, _AMPERE),
    "NVIDIA A100-SXM4-80GB": (312.0, 2039.0, _AMPERE),
    "NVIDIA A100 80GB PCIe": (312.0, 1935.0, _AMPERE),
    "NVIDIA H100 80GB HBM3": (989.4, 3350.0, _HOPPER),
    "NVIDIA H100 PCIe": (756.0, 2000.0, _HOPPER),  # memory also in the product brief PB-11133: "greater than 2,000"
    "NVIDIA H200": (989.4, 4800.0, "NVIDIA H200 data sheet"),
    "NVIDIA B200": (2250.0, 8000.0, "NVIDIA Blackwell architecture brief"),  # HGX, 1,000 W; some tables say 7,700 GB/s
    "NVIDIA L40": (181.05, 864.0, "NVIDIA L40 data sheet"),
    "NVIDIA L40S": (362.05, 864.0, "NVIDIA L40S data sheet"),
}
_DTYPES = ("bfloat16", "float16")


def peaks(name: str, dtype: str) -> Peaks:
    """Of a GPU by its name; unknown where the table has none."""
    if name not in _BY_NAME:
        return Peaks(name, dtype, None, None, "this GPU is not in the table of data sheets")
    tflops, memory_bandwidth, sheet = _BY_NAME[name]
    if dtype not in _DTYPES:
        return Peaks(name, dtype, None, memory_bandwidth * 1e9, f"{sheet}; no peak is told for {dtype}")
    return Peaks(name, dtype, tflops * 1e12, memory_bandwidth * 1e9, f"{sheet}, dense")
