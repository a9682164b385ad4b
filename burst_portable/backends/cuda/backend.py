"""NVIDIA GPUs as a backend. Triton, Gluon and NVML are imported when they are needed, never before."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from burst_portable.backends.base import Capabilities, Probe, Rates
from burst_portable.backends.cuda.hopper import HopperKernel
from burst_portable.backends.cuda.probe import device_facts
from burst_portable.comm.base import Transport
from burst_portable.comm.torch_dist import TorchDistTransport
from burst_portable.kernels.contract import Kernel
from burst_portable.kernels.lazy import LazyKernel
from burst_portable.kernels.reference import ReferenceKernel

# What plans are predicted with: bf16 attention on one H100 in this project's benchmarks, and NCCL on one node.
_CAPABILITIES = Capabilities(
    device_type="cuda", process_group="nccl", streams=True, rates=Rates(tflops=500.0, gbps=150.0)
)


def _kernels() -> tuple[Kernel, ...]:
    triton = LazyKernel("triton", "burst_portable.kernels.triton.launch", "TritonKernel", needs="triton")
    return HopperKernel(), triton, ReferenceKernel()


@dataclass(frozen=True)
class CudaBackend:
    """See `backends.base.Backend`."""

    name: str = "cuda"
    capabilities: Capabilities = _CAPABILITIES
    _made: tuple[Kernel, ...] = field(default_factory=_kernels, compare=False)

    def probe(self) -> Probe:
        if torch.version.hip is not None:
            return Probe(False, "this torch is built for ROCm")
        if not torch.backends.cuda.is_built():
            return Probe(False, "this torch is built without CUDA: install a CUDA build of torch")
        if not torch.cuda.is_available():
            return Probe(False, "no NVIDIA GPU is visible: look at nvidia-smi and CUDA_VISIBLE_DEVICES")
        return Probe(True, facts=device_facts())

    def kernels(self) -> tuple[Kernel, ...]:
        return self._made

    def transport(self, group: Any, deadline: float) -> Transport:
        return TorchDistTransport(group, "nccl", batched=True, deadline=deadline)
