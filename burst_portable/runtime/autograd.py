"""Run a prepared call with gradients: the `torch.autograd.Function` of attention, and the beginning of a pass."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from burst_portable.comm.agreement import agree, share_error
from burst_portable.errors import UnsupportedError
from burst_portable.kernels.base import as_kernels_take
from burst_portable.mesh import Mesh
from burst_portable.runtime.equal_shards import values_to_compare
from burst_portable.runtime.prepared_call import PreparedCall, call_wrapper
from burst_portable.runtime.validation import check_gradient
from burst_portable.utils.torch_modes import (
    apply_untransformed,
    disable_autocast,
    disable_caller_modes,
    on_device,
)


def run(
    prepared: PreparedCall, mesh: Mesh, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Return (out, LSE or None): see `Executor.forward`. Tensors are saved only if a gradient is needed."""
    prepared = wrapped_call(prepared, mesh)
    needs_grad = torch.is_grad_enabled() and (
        q.requires_grad or k.requires_grad or v.requires_grad or (sinks is not None and sinks.requires_grad)
    )
    with disable_caller_modes(q.device):
        begin(prepared, q.device, v=v)
        if needs_grad:
            result: tuple[Tensor, Tensor | None] = apply_untransformed(Attention, q, k, v, sinks, prepared)
            return result
        out, lse, _ = prepared.executor.forward(prepared, q, k, v, sinks, keep=False)
        if prepared.transport.size > 1:
            prepared.transport.end()
        return out, lse


class Attention(torch.autograd.Function):
    """Distributed attention with gradients. It has no second derivatives."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, prepared: PreparedCall
    ) -> tuple[Tensor, Tensor | None]:
        out, lse, saved = prepared.executor.forward(prepared, q, k, v, sinks, keep=True)
        ctx.save_for_backward(*saved, sinks)
        ctx.prepared, ctx.number = prepared, prepared.transport.state.passes
        if prepared.transport.size > 1:
            prepared.transport.end()
        if lse is not None:
            ctx.mark_non_differentiable(lse)
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, _: Tensor | None) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            _raise_second_derivative(ctx.prepared)
        _check_gradient(ctx.prepared, dout)
        # Read once: recomputing checkpoints return each tensor a single time.
        return *run_backward(ctx.prepared, ctx.number, ctx.saved_tensors, dout), None


def run_backward(
    prepared: PreparedCall, number: int, saved: Sequence[Tensor | None], dout: Tensor | None
) -> tuple[Tensor | None, ...]:
    """Run the backward pass of the forward pass `number`, and return (dq, dk, dv, dsinks).

    `saved`: The saved tensors of `Executor.forward`, and the sinks. `dout` is None if the result was not used here.
    """
    tensors: list[Any] = []
    for x in saved:  # hooks on saved tensors may change strides to ones that kernels do not take
        if x is not None and (type(x) is not Tensor or not x.is_contiguous()):
            x = as_kernels_take(x) if x.dim() == 4 else x.contiguous()  # contiguous LSE
        tensors.append(x)
    sinks = tensors.pop()
    with disable_autocast(tensors[0].device):
        begin(prepared, tensors[0].device, forward_pass=number)
        gradients = prepared.executor.backward(prepared, tensors, sinks, dout)
        if prepared.transport.size > 1:
            prepared.transport.end()
    return gradients


def _raise_second_derivative(prepared: PreparedCall) -> NoReturn:
    """Raise `UnsupportedError` for a backward pass that is itself to be differentiated.

    torch's `once_differentiable` raises only in the second backward pass, and not always: if autograd.grad gets only
    some inputs, second derivatives through attention would be left out silently.
    """
    error = UnsupportedError(
        "attention is differentiable once",
        got="a backward pass with create_graph=True",
        next_step="leave create_graph out, or use torch's own attention for second derivatives",
    )
    if prepared.transport.size > 1:
        share_error(prepared.transport, error)
    raise error


def _check_gradient(prepared: PreparedCall, dout: Tensor | None) -> None:
    """Raise `UnsupportedError` on all ranks for a gradient that cannot be sent: see `check_gradient`."""
    try:
        check_gradient(dout)
    except UnsupportedError as error:
        if prepared.transport.size > 1:
            share_error(prepared.transport, error)
        raise


def begin(prepared: PreparedCall, device: torch.device, *, v: Tensor | None = None, forward_pass: int = 0) -> None:
    """Check that all ranks make this call, and begin one of its passes.

    Args:
        prepared: The call.
        device: Device of its tensors.
        v: This rank's values in a forward pass. Default: ranks may have equal ones.
        forward_pass: For a backward pass, the number of its forward pass.
    """
    transport = prepared.transport
    if transport.size == 1:
        return
    prepared_pass = prepared.backward if forward_pass else prepared.forward
    seed = 0 if prepared.kernel_call.dropout is None else prepared.kernel_call.dropout.seed
    digest = prepared_pass.signature.digest + forward_pass.to_bytes(8, "little") + seed.to_bytes(8, "little")
    values = None if v is None else values_to_compare(prepared, v)
    agree(transport, prepared_pass.signature, forward_pass=forward_pass, seed=seed, values=values)
    with on_device(device):  # a transport rejects two ranks on one device
        transport.begin(digest, prepared_pass.bytes_per_sender)


def wrapped_call(prepared: PreparedCall, mesh: Mesh) -> PreparedCall:
    """Return the call as `call_wrapper` changes it: a profiler records it, an ablation leaves out a part of it."""
    wrap = call_wrapper.get()
    return prepared if wrap is None else wrap(prepared, mesh)
