"""Define a backend for burst_portable in a separate package. It runs on the CPU, so that you can try it anywhere."""

from __future__ import annotations

from typing import Any

import torch

from burst_portable.backends.base import Backend, Capabilities, HardwareSpec, Probe, require_package
from burst_portable.comm.base import Transport
from burst_portable.comm.torch_dist import TorchDistTransport
from burst_portable.kernels.base import Kernel
from burst_portable.kernels.reference import ReferenceKernel
from their_attention.kernel import TheirKernel

# Raises with the next step if torch is absent or too old.
require_package("torch", "2.11")


class TheirBackend(Backend):
    """See `burst_portable.backends.base.Backend`."""

    name = "theirs"
    capabilities = Capabilities(
        device_type="cpu",
        process_group="gloo",
        streams=False,
        hardware=HardwareSpec(tflops=0.05, intra_node_bandwidth=1.0),
    )

    def probe(self) -> Probe:
        """Return whether this machine can run the backend, or the reason why not. Never raises."""
        if not torch.distributed.is_gloo_available():
            return Probe(False, "this torch is built without gloo")
        # Its device is the CPU, so what runs there is evidence of the device itself.
        return Probe(True, facts={"threads": torch.get_num_threads(), "evidence_level": "device"})

    def kernels(self) -> tuple[Kernel, ...]:
        """Return the preferred kernel first. The reference kernel serves the calls that it declines."""
        return TheirKernel(), ReferenceKernel()

    def transport(self, group: Any, timeout: float) -> Transport:
        """Connect the ranks of a group by torch.distributed over gloo."""
        return TorchDistTransport(group, "gloo", batched=False, timeout=timeout)


backend = TheirBackend()
