"""Define the backend of NVIDIA GPUs. Triton, Gluon and NVML are imported only when they are needed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from burst_portable.backends.base import (
    AcceleratorBackend,
    Capabilities,
    Facts,
    HardwareSpec,
    LinkCounters,
    MeasuredHardware,
    Meter,
    Peaks,
)
from burst_portable.backends.cuda.driver import leave_captures_alone
from burst_portable.backends.cuda.hopper.flash4 import HopperFlash4Kernel
from burst_portable.backends.cuda.hopper.kernel import HopperKernel
from burst_portable.backends.cuda.library_kernels import CudaFlashKernel, CudnnKernel
from burst_portable.backends.cuda.machines import hardware_of_machine, known_machines, peaks
from burst_portable.backends.cuda.nvml import NvlinkCounters, NvmlMeter, libraries
from burst_portable.comm.base import Transport
from burst_portable.comm.torch_dist import TorchDistTransport
from burst_portable.kernels.base import Kernel, LazyKernel
from burst_portable.kernels.reference import ReferenceKernel


def has_high_priority(group: Any) -> bool:
    """Return whether the NCCL stream of a group (None: the default group) has high priority."""
    found: Any = dist.group.WORLD if group is None else group
    try:
        options = getattr(found._get_backend(torch.device("cuda")), "options", None)
    except RuntimeError:  # the group has no backend for this device; its first message raises that error
        return False
    return bool(getattr(options, "is_high_priority_stream", False))


class CudaBackend(AcceleratorBackend):
    """See `backends.base.Backend`."""

    name = "cuda"
    # Rates for predicted times: bf16 attention on one H100 in this project's benchmarks, and NCCL on one node.
    capabilities = Capabilities(
        device_type="cuda",
        process_group="nccl",
        streams=True,
        hardware=HardwareSpec(tflops=500.0, intra_node_bandwidth=150.0),
        direct_transport="peer_copy",
    )

    def unavailable_reason(self) -> str:
        if torch.version.hip is not None:
            return "this torch is built for ROCm; use the backend 'rocm', or install a CUDA build of torch"
        if not torch.backends.cuda.is_built():
            return "this torch is built without CUDA; install a CUDA build of torch"
        if not torch.cuda.is_available():
            return self.no_device_reason("no NVIDIA GPU is visible", "nvidia-smi and CUDA_VISIBLE_DEVICES")
        return ""

    def make_kernels(self) -> Iterable[Kernel | LazyKernel]:
        # Our kernels come first. On one H100, those of torch were faster on no row of benchmarks/README.md. hopper
        # computes any mask in one launch that merges in its epilogue. Library kernels need a call per box and causal
        # square. Only flash-attn-4 was faster, on boxes, causal squares and some windows. On other devices nothing was
        # measured against triton, so library kernels must be named.
        flash_4 = LazyKernel(
            "flash-attn-4",
            "burst_portable.backends.cuda.library_kernels:Flash4Kernel",
            needs="flash_attn",
            install="pip install flash-attn-4",
        )
        triton, triton_tf32 = (
            LazyKernel(
                name,
                f"burst_portable.kernels.triton.triton_kernel:{kernel}",
                needs="triton",
                at_least=(3, 6),
                install="in the clone, run: pip install '.[cuda]'",
            )
            for name, kernel in (("triton", "TritonKernel"), ("triton-tf32", "Tf32Kernel"))
        )
        yield HopperFlash4Kernel(flash_4)
        yield HopperKernel()
        yield triton
        yield triton_tf32
        yield CudnnKernel()
        yield flash_4
        yield CudaFlashKernel()
        yield ReferenceKernel()

    def describe(self, properties: Any) -> Facts:
        capability = f"sm_{properties.major}{properties.minor}"
        return {"capability": capability, "multiprocessors": properties.multi_processor_count}

    def libraries(self) -> Facts:
        return {**libraries(), "evidence_level": "device"}

    def measured_hardware(self, ranks: int, kernel: str) -> HardwareSpec | None:
        """Return the rates of the current kind of GPU."""
        return (
            hardware_of_machine(torch.cuda.get_device_name(), ranks, kernel) if not self.unavailable_reason() else None
        )

    def machines(self, ranks: int) -> Mapping[str, MeasuredHardware]:
        return known_machines(ranks, HopperKernel.traits)

    def meter(self, index: int) -> Meter:
        return NvmlMeter(_uuid(index))

    def link_counters(self, index: int) -> LinkCounters:
        return NvlinkCounters(_uuid(index))

    def peaks(self, dtype: str) -> Peaks:
        return peaks(torch.cuda.get_device_name(), dtype)

    def transport(self, group: Any, timeout: float) -> Transport:
        return TorchDistTransport(
            group,
            "nccl",
            batched=True,
            timeout=timeout,
            in_watch=leave_captures_alone,
            high_priority=has_high_priority(group),
        )

    def group_options(self, timeout: timedelta) -> Any:
        """Return options with which NCCL's kernels run on a stream of high priority; None without NCCL."""
        if not (dist.is_available() and dist.is_nccl_available()):
            return None
        options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
        options._timeout = timeout  # torch warns if it differs from the group's timeout
        return options

    def connect_direct(self, other: Transport, group: Any, timeout: float) -> Transport:
        """Connect peer copies, if all ranks can have them."""
        from burst_portable.backends.cuda.peers.connection import connect

        return connect(other, group, timeout)


def _uuid(index: int) -> str:
    """Return the UUID of the GPU with torch's index. Other libraries number GPUs differently."""
    return str(torch.cuda.get_device_properties(index).uuid)
