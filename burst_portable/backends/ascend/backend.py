"""Huawei's NPUs as a backend. torch_npu is imported when the backend is asked whether it can run, never before."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from burst_portable.backends.ascend.attention import FusionKernel
from burst_portable.backends.ascend.probe import look
from burst_portable.backends.base import Capabilities, Probe, Rates
from burst_portable.comm.base import Transport
from burst_portable.comm.torch_dist import TorchDistTransport
from burst_portable.kernels.contract import Kernel
from burst_portable.kernels.lazy import LazyKernel
from burst_portable.kernels.reference import ReferenceKernel

# Half of what Huawei states for an Ascend 910B, in 16 bits and for one HCCS link. Nothing was measured.
_CAPABILITIES = Capabilities(
    device_type="npu", process_group="hccl", streams=True, rates=Rates(tflops=150.0, gbps=25.0)
)


def _kernels() -> tuple[Kernel, ...]:
    home = "burst_portable.backends.ascend.triton_launch"
    return FusionKernel(), LazyKernel("triton", home, "AscendTritonKernel", needs="triton"), ReferenceKernel()


@dataclass(frozen=True)
class AscendBackend:
    """See `backends.base.Backend`."""

    name: str = "ascend"
    capabilities: Capabilities = _CAPABILITIES
    _made: tuple[Kernel, ...] = field(default_factory=_kernels, compare=False)

    def probe(self) -> Probe:
        return look()

    def kernels(self) -> tuple[Kernel, ...]:
        return self._made

    def transport(self, group: Any, deadline: float) -> Transport:
        return TorchDistTransport(group, "hccl", batched=True, deadline=deadline)
