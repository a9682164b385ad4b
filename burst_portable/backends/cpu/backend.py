"""The CPU as a backend: a laptop, a CI machine, and the oracle's home."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass, field
from typing import Any

import torch

from burst_portable.backends.base import Capabilities, Peaks, Probe, Rates
from burst_portable.backends.cpu.attention import CpuFlashKernel
from burst_portable.backends.cpu.peaks import peaks
from burst_portable.comm.base import Transport
from burst_portable.comm.torch_dist import TorchDistTransport
from burst_portable.kernels.contract import Kernel
from burst_portable.kernels.reference import ReferenceKernel

_CAPABILITIES = Capabilities(
    device_type="cpu",
    process_group="gloo",
    streams=False,
    rates=Rates(tflops=0.1, gbps=1.0, hop_latency=200e-6, launch_latency=50e-6),
)


@dataclass(frozen=True)
class CpuBackend:
    """See `backends.base.Backend`."""

    name: str = "cpu"
    capabilities: Capabilities = _CAPABILITIES
    _kernels: tuple[Kernel, ...] = field(default_factory=lambda: (CpuFlashKernel(), ReferenceKernel()), compare=False)

    def probe(self) -> Probe:
        return Probe(
            True,
            facts={
                "processor": platform.processor() or platform.machine(),
                "cores": os.cpu_count(),
                "threads": torch.get_num_threads(),
                "gloo": torch.distributed.is_available() and torch.distributed.is_gloo_available(),
            },
        )

    def kernels(self) -> tuple[Kernel, ...]:
        return self._kernels

    def peaks(self, dtype: str) -> Peaks:
        return peaks(dtype)

    def transport(self, group: Any, deadline: float) -> Transport:
        return TorchDistTransport(group, "gloo", batched=False, deadline=deadline)
