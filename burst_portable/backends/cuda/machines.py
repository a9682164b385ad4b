"""Measured rates of NVIDIA GPUs by machine and kernel, for `auto`, and their peaks: see `planning.hardware`.

Kernels on H100: one causal bf16 call with heads of 128 (benchmarks/attention.py, 2026-11-21). The launch latency is the
extra time of 4,096 tokens over that rate. Kernels on H200: between the rate of a single call and that of full passes of
32,768 and 131,072 tokens (benchmarks/ring.py, 2026-11-21).

Links: GB/s per rank, ten messages back to back, the slowest rank; NVLink through switches, NCCL 2.28.9, torch 2.11.0.
They were measured on H200. H100 has the same NVLink, and its peer copies between two ranks were measured too
(benchmarks/ring.py, 2026-11-25). With these numbers, `auto` chooses Ulysses for the five masks of
tests/strategies/measured/bench-h100x2-2026-11-25.json on which it was the fastest.
"""

from __future__ import annotations

from dataclasses import replace

from burst_portable.backends.base import Curve, HardwareSpec, MeasuredHardware, Peaks, sheet_peaks
from burst_portable.planning.call import KernelTraits

MIB = 1 << 20
_H100 = {
    "hopper": HardwareSpec(690.0, 150.0, launch_latency=30e-6, backward_tflops=598.0, backward_launch_latency=110e-6),
    "triton": HardwareSpec(485.0, 150.0, launch_latency=40e-6, backward_tflops=411.0, backward_launch_latency=175e-6),
    "cudnn": HardwareSpec(618.0, 150.0, launch_latency=50e-6, backward_tflops=537.0, backward_launch_latency=180e-6),
}
_H200 = {
    **_H100,  # the same chip with more memory. Kernels were measured while four of them computed.
    # Several backward launches took longer than those of Ulysses, in addition to the other predicted differences: 1 to
    # 4 % on four GPUs, less on two. The latency of another backward launch was fitted to both passes of sixteen masks
    # on two GPUs (benchmarks/choices.py): a choice then takes at most 1.1 % longer than the fastest measured strategy.
    "hopper": HardwareSpec(640.0, 150.0, 20e-6, 60e-6, 580.0, 30e-6, multi_launch_efficiency=0.99),
    # Forward TFLOP/s on two and four GPUs: 510 to 550 over 131,072 keys, 500 to 600 in ring steps over 32,768 keys each
    # (benchmarks/ring.py, 2026-11-22).
    "cudnn": HardwareSpec(585.0, 150.0, 20e-6, 80e-6, 515.0, 180e-6, long_kv_efficiency=(1 << 17, 0.9)),
}
# From each rank to the next one, by number of ranks. Four ranks: mean of two runs.
_NCCL: dict[int, Curve] = {
    2: ((8 * MIB, 164.0), (64 * MIB, 266.0), (256 * MIB, 307.0)),
    4: ((8 * MIB, 99.0), (64 * MIB, 140.0), (256 * MIB, 286.0)),
    8: ((8 * MIB, 63.0), (64 * MIB, 79.0), (256 * MIB, 295.0)),
}
_PEER_COPY: dict[int, Curve] = {
    4: ((8 * MIB, 234.0), (64 * MIB, 343.0), (256 * MIB, 380.0)),
    8: ((8 * MIB, 318.0), (64 * MIB, 377.0), (256 * MIB, 388.0)),
}
_PEER_COPY_H100 = {**_PEER_COPY, 2: ((8 * MIB, 206.0), (64 * MIB, 356.0), (256 * MIB, 378.0))}
# NCCL's all-to-all on eight H200. It occupies more multiprocessors than point-to-point messages.
_NCCL_ALL_TO_ALL: Curve = ((8 * MIB, 122.0), (64 * MIB, 262.0), (256 * MIB, 305.0))
# (forward, backward) share of the transfer time by which NCCL delays a pass of a ring on four H200. The forward kernel
# occupies all multiprocessors until it ends; the backward kernel frees them block by block.
_NCCL_SLOWDOWN = (0.9, 0.3)
# The same if NCCL's stream has high priority, on two H200 (`burst-portable measure`, 2026-11-22). Then the programs of
# hopper's forward yield, and those of triton and flash-attn-4 end early. cuDNN's stay resident, and messages wait.
_NCCL_SLOWDOWN_HIGH_PRIORITY = {
    "hopper": (0.19, 0.33),
    "hopper+flash-attn-4": (0.19, 0.33),
    "triton": (0.14, 0.56),
    "flash-attn-4": (0.15, 0.16),
    "cudnn": (0.96, 0.92),
}
_BLOCK = 128  # rows and columns of a block, approximately, in our kernels, cuDNN and flash attention
_MEMORY = 3500.0  # GB/s of torch's elementwise operators on an H200; the memory has a peak of 4800
_MEMORY_H100 = _MEMORY * 3350 / 4800  # by the peaks, not measured


def hardware_of_machine(name: str, ranks: int, kernel: str = "hopper") -> HardwareSpec | None:
    """Return the measured rates of a GPU by the driver's name for it; None if none were measured."""
    kernels = _H200 if "H200" in name else _H100 if "H100" in name else {}
    if not kernels:
        return None
    # "hopper+flash-attn-4" also gets hopper's rates. Plans predict steps, and hopper computes those.
    hardware = replace(kernels.get(kernel, kernels["hopper"]), block=_BLOCK)
    of = f"of {kernel if kernel in kernels else 'hopper'} on"
    is_h100 = kernels is _H100
    return replace(
        hardware,
        p2p_bandwidth=_by_ranks(_NCCL, ranks),
        all_to_all_bandwidth=_NCCL_ALL_TO_ALL if ranks > 2 else (),
        peer_copy_bandwidth=_by_ranks(_PEER_COPY_H100 if is_h100 else _PEER_COPY, ranks),
        comm_slowdown=_NCCL_SLOWDOWN,
        comm_slowdown_high_priority=_NCCL_SLOWDOWN_HIGH_PRIORITY.get(kernel or "hopper"),
        memory_bandwidth=_MEMORY_H100 if is_h100 else _MEMORY,
        source=f"{of} H100 and links as of H200" if is_h100 else f"{of} H200 and their links",
    )


def known_machines(ranks: int, traits: KernelTraits) -> dict[str, MeasuredHardware]:
    """Return the rates of the Hopper kernels on each measured GPU, by its name in lower case."""
    found = {}
    for device in ("H100", "H200"):
        hardware = hardware_of_machine(device, ranks)
        assert hardware is not None
        about = (f"NVIDIA {device}", ranks, "hopper", "2026-11-21", "bfloat16", 128)
        found[device.lower()] = MeasuredHardware(replace(hardware, kernel=traits), *about)
    return found


def _by_ranks(curves: dict[int, Curve], ranks: int) -> Curve:
    """Return the curve for this many ranks, or for the next larger number that was measured."""
    return curves[min((n for n in curves if n >= ranks), default=max(curves))]


# Compared in November 2026 with public copies of these sheets. Figures "with sparsity" are twice the dense ones. Left
# out, because no copy was found or copies differ: H100 NVL, H200 NVL, GH200, GB200, B300.
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
    "NVIDIA B200": (2250.0, 8000.0, "NVIDIA Blackwell architecture brief"),  # HGX, 1,000 W; 7,700 GB/s in some tables
    "NVIDIA L40": (181.05, 864.0, "NVIDIA L40 data sheet"),
    "NVIDIA L40S": (362.05, 864.0, "NVIDIA L40S data sheet"),
}


def peaks(name: str, dtype: str) -> Peaks:
    """Return the peaks of a GPU by its name; unknown if the table lacks it."""
    return sheet_peaks(name, dtype, _BY_NAME.get(name))
