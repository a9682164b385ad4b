"""A backend for burst_portable in a package of its own. It runs on the CPU, so that everybody can try it."""

from __future__ import annotations

from typing import Any

import torch

from burst_portable.backends.base import Backend, Capabilities, Probe, Rates, require_package
from burst_portable.comm.base import Transport
from burst_portable.comm.torch_dist import TorchDistTransport
from burst_portable.kernels.base import Kernel
from burst_portable.kernels.reference import ReferenceKernel
from their_attention.kernel import TheirKernel

# Absent and too old are two messages, and both say what to do.
require_package("torch", "2.11")


class TheirBackend(Backend):
    """See `burst_portable.backends.base.Backend`."""

    name = "theirs"
    capabilities = Capabilities(
        device_type="cpu", process_group="gloo", streams=False, rates=Rates(tflops=0.05, gbps=1.0)
    )

    def probe(self) -> Probe:
        """Never raises: a machine without the vendor's device is a reason."""
        if not torch.distributed.is_gloo_available():
            return Probe(False, "this torch is built without gloo")
        return Probe(True, facts={"threads": torch.get_num_threads()})

    def kernels(self) -> tuple[Kernel, ...]:
        """The preferred first; what it declines goes to the reference kernel."""
        return TheirKernel(), ReferenceKernel()

    def transport(self, group: Any, deadline: float) -> Transport:
        """torch.distributed over gloo."""
        return TorchDistTransport(group, "gloo", batched=False, deadline=deadline)


backend = TheirBackend()
