"""Run a prepared call on tensors without memory, so that its kernels are compiled before they are launched.

The executors then make the launches of one rank, with the strides and dtypes of a real call. The kernels compile them
and launch nothing: see `kernels.triton.compile_only`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from burst_portable.backends.base import Backend
from burst_portable.comm.agreement import call_signature
from burst_portable.comm.base import Handles, Message, Transport
from burst_portable.kernels.base import Kernel
from burst_portable.planning.plans import Plan
from burst_portable.runtime.prepare import plan_for_kernel, prepared_call
from burst_portable.runtime.prepared_call import NO_OBSERVER, PreparedCall


class AbsentTransport(Transport):
    """A transport that sends nothing, for tensors of torch's device "meta". Like NCCL, it writes into local buffers."""

    persistent_inbox = True

    def __init__(self, rank: int, size: int) -> None:
        super().__init__("absent", rank, size)

    def post(self, sends: Sequence[Message], receives: Sequence[Message], label: str = "") -> Handles:
        return [_Complete()] * len(sends), [_Complete()] * len(receives)


class _Complete:
    """Handle of a message without contents."""

    def wait(self) -> None:
        """Return at once."""


def absent_call(plan: Plan, backend: Backend, kernel: Kernel, rank: int) -> PreparedCall:
    """Return what one rank runs for a plan, without the other ranks."""
    plan = plan_for_kernel(plan, kernel)
    return prepared_call(plan, backend, kernel, AbsentTransport(rank, plan.call.ranks), call_signature({}))


def rehearse(
    prepared: PreparedCall, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None, *, gradients: bool
) -> None:
    """Make the launches of a call on one rank.

    Args:
        prepared: The call. Its messages are not sent.
        q: This rank's queries, of shape [B, S, Hq, D], on the device "meta".
        k: Its keys.
        v: Its values.
        sinks: Sink logits of shape [Hq]. Default: none.
        gradients: Whether to run the backward pass too.
    """
    transport = AbsentTransport(prepared.transport.rank, prepared.transport.size)
    prepared = replace(prepared, transport=transport, observer=NO_OBSERVER)
    with torch.no_grad():
        out, _, saved = prepared.executor.forward(prepared, q, k, v, sinks, keep=gradients)
        if gradients:
            prepared.executor.backward(prepared, saved, sinks, torch.empty(out.shape, dtype=out.dtype, device="meta"))
