"""What backends of accelerators share: devices that torch drives as ``torch.<device type>``, with streams."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any

import torch

from burst_portable.backends.base import Capabilities, Probe, wrong_with
from burst_portable.comm.base import Transport
from burst_portable.comm.torch_dist import TorchDistTransport
from burst_portable.errors import explain, in_a_line
from burst_portable.kernels.contract import Kernel

Facts = dict[str, Any]
TORCH = "2.11"
"""The first version of torch that accelerators are served with."""


class AcceleratorBackend(ABC):
    """See `backends.base.Backend`. A vendor says what is missing, describes its devices, and makes its kernels."""

    name: str
    capabilities: Capabilities

    def __init__(self) -> None:
        self._kernels = tuple(self.make_kernels())

    @abstractmethod
    def missing(self) -> str:
        """Why it cannot run on this machine and, after a semicolon, what to do; "" if it can. Does not raise."""

    @abstractmethod
    def make_kernels(self) -> Iterable[Kernel]:
        """Its kernels, in order of preference; called once."""

    @abstractmethod
    def describe(self, properties: Any) -> Facts:
        """What torch's properties of a device say besides name and memory. Called only where nothing is missing."""

    @abstractmethod
    def libraries(self) -> Facts:
        """Versions, the driver, links. Called only where nothing is missing."""

    def probe(self) -> Probe:
        if reason := wrong_with("torch", TORCH) or self.missing():
            return Probe(False, reason)
        return Probe(True, facts={"devices": self._devices(), **self.libraries()})

    def kernels(self) -> tuple[Kernel, ...]:
        return self._kernels

    def transport(self, group: Any, deadline: float) -> Transport:
        return TorchDistTransport(group, self.capabilities.process_group, batched=True, deadline=deadline)

    def why_none(self, missing: str, look_at: str) -> str:
        """The reason if torch sees no device, with what torch says when it starts the driver: absent, too old ..."""
        try:
            torch.get_device_module(self.capabilities.device_type).init()
            said = "a driver that starts and shows no device"
        except (RuntimeError, AssertionError) as error:
            said = in_a_line(error)
        return explain(missing, got=said, next_step=f"look at {look_at}")

    def _devices(self) -> list[Facts]:
        module = torch.get_device_module(self.capabilities.device_type)
        every = [module.get_device_properties(index) for index in range(module.device_count())]
        return [
            {"name": one.name, "memory_gib": round(one.total_memory / 2**30, 1), **self.describe(one)} for one in every
        ]
