"""Run a prepared call on tensors without memory, so that its kernels are compiled before they are launched.

The executors then make the launches of one rank, with the strides and dtypes of a real call. The kernels compile them
and launch nothing: see `kernels.triton.arguments.compiled_kernel`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import Parameter

from burst_portable.comm.base import Handles, Message, Transport
from burst_portable.mesh import Mesh
from burst_portable.runtime.prepared_call import NO_OBSERVER, PreparedCall
from burst_portable.utils.torch_modes import disable_autocast, disable_modes, on_device


class AbsentTransport(Transport):
    """A transport that sends nothing, for tensors of torch's device "meta". Like NCCL, it writes into local buffers."""

    keeps_received = True

    def __init__(self, rank: int, size: int) -> None:
        super().__init__("absent", rank, size)

    def post(self, sends: Sequence[Message], receives: Sequence[Message], label: str = "") -> Handles:
        return [_Complete()] * len(sends), [_Complete()] * len(receives)


class _Complete:
    """Handle of a message without contents."""

    def wait(self) -> None:
        """Return at once."""


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


def compile_ahead(prepared: PreparedCall, mesh: Mesh, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> None:
    """Compile the kernels of both passes of a call side by side, once for similar lengths on a mesh.

    Kernels may depend on the length, and on whether it is a multiple of 16. Without gradients on one rank there is one
    kernel, which the launch compiles.
    """
    kernel, call, plan = prepared.kernel, prepared.kernel_call, prepared.plan
    tensors = [x for x in (q, k, v, sinks) if x is not None]
    gradients = torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
    real = all(type(x) in (Tensor, Parameter) and not x.is_meta for x in tensors)
    if not (kernel.traits.compiles_ahead and mesh.config.compile_ahead and real) or not (gradients or mesh.size > 1):
        return
    sizes = call.heads, call.kv_heads, call.head_dim, call.v_head_dim, call.dtype
    settings = call.softcap, call.dropout is None, call.deterministic, call.sinks, prepared.with_lse, gradients
    length = q.shape[1].bit_length(), q.shape[1] % 16 == 0
    key = "compiled", kernel.name, q.device, sizes, length, settings, plan.strategy, plan.transfer("forward")
    mesh.cached(key, lambda: _compile(prepared, tensors, gradients=gradients))


def _compile(prepared: PreparedCall, tensors: Sequence[Tensor], *, gradients: bool) -> bool:
    """Compile the kernels of a call, and return True."""
    from burst_portable.kernels.triton.arguments import compile_side_by_side

    device = tensors[0].device
    q, k, v, *sinks = map(_absent, tensors)
    with on_device(device), disable_autocast(device), disable_modes():
        compile_side_by_side(lambda: rehearse(prepared, q, k, v, *sinks, gradients=gradients))
    return True


def _absent(x: Tensor) -> Tensor:
    """Return a tensor without memory that has the strides of x, or contiguous ones if its last stride is not 1."""
    if x.stride(-1) != 1:
        return torch.empty(x.shape, dtype=x.dtype, device="meta")
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")
