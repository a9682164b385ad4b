"""Define the backend of AMD GPUs. Triton, AITER and amdsmi are imported only when they are needed.

torch for ROCm calls its devices ``cuda`` and RCCL ``nccl``. Only `torch.version.hip` distinguishes the two builds.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from burst_portable.backends.base import AcceleratorBackend, Capabilities, Facts, HardwareSpec, Meter, Peaks
from burst_portable.backends.rocm.device import AmdsmiMeter, architecture, libraries, peaks
from burst_portable.backends.rocm.flash_kernels import RocmFlashKernel
from burst_portable.errors import BackendUnavailableError
from burst_portable.kernels.base import Kernel, LazyKernel
from burst_portable.kernels.reference import ReferenceKernel


class RocmBackend(AcceleratorBackend):
    """See `backends.base.Backend`."""

    name = "rocm"
    # Rates for predicted times, not measured: a quarter of the matrix rate that AMD publishes for one MI300X, and half
    # of the bandwidth of its seven links.
    capabilities = Capabilities(
        device_type="cuda",
        process_group="nccl",
        streams=True,
        hardware=HardwareSpec(tflops=325.0, intra_node_bandwidth=220.0),
    )

    def unavailable_reason(self) -> str:
        if torch.version.hip is None:
            return (
                f"this torch ({torch.__version__}) is not built for ROCm; install one of PyTorch's ROCm wheels: "
                "PyTorch's own package index has them, PyPI does not"
            )
        if not torch.cuda.is_available():
            look_at = (
                "rocminfo, at HIP_VISIBLE_DEVICES and ROCR_VISIBLE_DEVICES, and whether /dev/kfd and /dev/dri may be "
                "opened (groups video and render)"
            )
            return self.no_device_reason("no AMD GPU is visible", look_at)
        return ""

    def make_kernels(self) -> Iterable[Kernel | LazyKernel]:
        # The order was not measured. Triton comes first because it computes every mask in one launch, merges in its
        # epilogue and is deterministic. AITER and torch's flash attention need a call per box and causal square.
        yield LazyKernel(
            "triton",
            "burst_portable.kernels.triton.triton_kernel:TritonKernel",
            needs="triton",
            at_least=(3, 6),
            install="install the triton that comes with PyTorch's ROCm wheels, from PyTorch's own package index",
        )
        yield LazyKernel(
            "aiter",
            "burst_portable.backends.rocm.flash_kernels:AiterKernel",
            needs="aiter",
            install="AMD's container images include it; its repository describes how to build it",
        )
        yield RocmFlashKernel()
        yield ReferenceKernel()

    def describe(self, properties: Any) -> Facts:
        return {"architecture": architecture(properties), "compute_units": properties.multi_processor_count}

    def libraries(self) -> Facts:
        return {**libraries(), "evidence_level": "device"}

    def meter(self, index: int) -> Meter:
        device: Any = torch.cuda.get_device_properties(index)
        if not hasattr(device, "pci_bus_id"):  # depends on the release of torch
            raise BackendUnavailableError("this torch does not report PCI addresses, by which amdsmi finds a device")
        return AmdsmiMeter(f"{device.pci_domain_id:04x}:{device.pci_bus_id:02x}:{device.pci_device_id:02x}.0")

    def peaks(self, dtype: str) -> Peaks:
        device = torch.cuda.get_device_properties(torch.cuda.current_device())
        return peaks(device.name, architecture(device), device.multi_processor_count, dtype)
