"""Huawei's NPUs as a backend. torch_npu is imported when the backend is asked whether it can run, never before."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from burst_portable.backends.accelerator import AcceleratorBackend, Facts
from burst_portable.backends.ascend.attention import FusionKernel
from burst_portable.backends.ascend.probe import libraries, missing
from burst_portable.backends.ascend.tracer import Event, NpuTracer, kineto
from burst_portable.backends.base import Capabilities, Peaks, Rates, Tracer
from burst_portable.kernels.contract import Kernel
from burst_portable.kernels.lazy import LazyKernel
from burst_portable.kernels.reference import ReferenceKernel


class AscendBackend(AcceleratorBackend):
    """See `backends.base.Backend`."""

    name = "ascend"
    # Half of what Huawei states for an Ascend 910B, in 16 bits and for one HCCS link. Nothing was measured.
    capabilities = Capabilities(
        device_type="npu", process_group="hccl", streams=True, rates=Rates(tflops=150.0, gbps=25.0)
    )

    def missing(self) -> str:
        return missing()

    def make_kernels(self) -> Iterable[Kernel]:
        yield FusionKernel()
        home = "burst_portable.backends.ascend.triton_launch"
        yield LazyKernel("triton", home, "AscendTritonKernel", needs="triton", install="pip install triton-ascend")
        yield ReferenceKernel()

    def describe(self, properties: Any) -> Facts:
        return {}

    def libraries(self) -> Facts:
        return libraries()

    def tracer(self) -> Tracer:
        return NpuTracer()

    def kineto(self, events: list[Event]) -> list[Event] | None:
        return kineto(events)

    def peaks(self, dtype: str) -> Peaks:
        name = str(torch.get_device_module(self.capabilities.device_type).get_device_name())
        return Peaks(name, dtype, None, None, "Huawei's sources differ on what one NPU of this name can do")
