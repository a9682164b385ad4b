"""Define the backend of AMD GPUs. Triton, AITER and amdsmi are imported only when they are needed.

torch for ROCm calls its devices ``cuda`` and RCCL ``nccl``; `torch.version.hip` tells the two builds apart.
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
    # What plans are predicted with. Nothing here was measured: a quarter of the matrix rate that AMD publishes for
    # one MI300X, and half of what its seven links carry.
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
            where = (
                "rocminfo, at HIP_VISIBLE_DEVICES and ROCR_VISIBLE_DEVICES, and whether /dev/kfd and /dev/dri may be"
            )
            return self.no_device_reason("no AMD GPU is visible", f"{where} opened (groups video and render)")
        return ""

    def make_kernels(self) -> Iterable[Kernel | LazyKernel]:
        # The order was not measured. Triton comes first because it takes every mask in one launch, merges in its
        # epilogue and is deterministic; the others take a call for every box and triangle.
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
            install="AMD's images have it, and its repository says how to build it",
        )
        yield RocmFlashKernel()
        yield ReferenceKernel()

    def describe(self, properties: Any) -> Facts:
        return {"architecture": architecture(properties), "compute_units": properties.multi_processor_count}

    def libraries(self) -> Facts:
        return libraries()

    def meter(self, index: int) -> Meter:
        one: Any = torch.cuda.get_device_properties(index)  # releases of torch differ in what it tells
        if not hasattr(one, "pci_bus_id"):
            raise BackendUnavailableError("this torch does not tell a device's PCI address, by which amdsmi knows it")
        return AmdsmiMeter(f"{one.pci_domain_id:04x}:{one.pci_bus_id:02x}:{one.pci_device_id:02x}.0")

    def peaks(self, dtype: str) -> Peaks:
        one = torch.cuda.get_device_properties(torch.cuda.current_device())
        return peaks(one.name, architecture(one), one.multi_processor_count, dtype)
