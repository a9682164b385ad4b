"""Define the backend of Huawei's NPUs. torch_npu is imported by the first probe, never before."""

from __future__ import annotations

from collections.abc import Iterable
from importlib import import_module
from importlib.metadata import version
from typing import Any

import torch

from burst_portable.backends.ascend.attention import FusionKernel
from burst_portable.backends.ascend.tracer import Event, NpuTracer, kineto
from burst_portable.backends.base import (
    AcceleratorBackend,
    Capabilities,
    Facts,
    HardwareSpec,
    Peaks,
    Tracer,
    package_error,
)
from burst_portable.errors import format_error, in_a_line
from burst_portable.kernels.base import Kernel, LazyKernel
from burst_portable.kernels.reference import ReferenceKernel

AT_LEAST = "2.11"
_INSTALL = "install CANN, then the torch_npu of this torch's version: pip install '.[ascend]' in the clone"


class AscendBackend(AcceleratorBackend):
    """See `backends.base.Backend`."""

    name = "ascend"
    # Half of what Huawei states for an Ascend 910B, in 16 bits and for one HCCS link. Nothing was measured.
    capabilities = Capabilities(
        device_type="npu",
        process_group="hccl",
        streams=True,
        hardware=HardwareSpec(tflops=150.0, intra_node_bandwidth=25.0),
    )

    def unavailable_reason(self) -> str:
        """Import torch_npu if it is installed."""
        if reason := package_error("torch_npu", AT_LEAST, install=_INSTALL):
            return reason
        built, found = version("torch_npu"), torch.__version__
        required, release = (".".join(text.partition("+")[0].split(".")[:2]) for text in (built, found))
        if required != release:  # it would crash without a message
            step = f"pip install 'torch=={required}.*' or the torch_npu of torch {release}"
            got = f"torch_npu {built}, torch {found}"
            return format_error("torch_npu is built for another torch", got=got, next_step=step)
        try:
            npu = import_module("torch_npu").npu
        # The message must include the error, which is mostly a missing library of CANN.
        except Exception as error:  # noqa: BLE001
            step = "source CANN's set_env.sh, and check that its version fits torch_npu's"
            return format_error("torch_npu is installed and fails to import", got=in_a_line(error), next_step=step)
        return "" if npu.is_available() else "torch_npu sees no NPU; look at npu-smi info and ASCEND_RT_VISIBLE_DEVICES"

    def make_kernels(self) -> Iterable[Kernel | LazyKernel]:
        yield FusionKernel()
        target = "burst_portable.backends.ascend.triton_launch:AscendTritonKernel"
        yield LazyKernel("triton", target, needs="triton", install="pip install triton-ascend")
        yield ReferenceKernel()

    def describe(self, properties: Any) -> Facts:
        return {}

    def libraries(self) -> Facts:
        cann = str(import_module("torch_npu").npu.utils.get_cann_version("CANN"))
        facts: Facts = {"torch_npu": version("torch_npu"), "cann": cann}
        # `make conform-ascend` builds a stand-in with this version, so that its reports are never taken for a device's.
        return {**facts, "evidence_level": "simulated" if "stand-in" in cann else "device"}

    def tracer(self) -> Tracer:
        return NpuTracer()

    def kineto(self, events: list[Event]) -> list[Event] | None:
        return kineto(events)

    def peaks(self, dtype: str) -> Peaks:
        name = str(torch.get_device_module(self.capabilities.device_type).get_device_name())
        return Peaks(name, dtype, None, None, "Huawei's sources differ on what one NPU of this name can do")
