"""The one autograd.Function. A call's plan, runtime and options are settled in forward and kept for backward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import torch
from torch import Tensor

from burst_portable import numerics
from burst_portable.comm.agreement import CallSignature, agree, share_error
from burst_portable.errors import UnsupportedError
from burst_portable.kernels.base import Gradients, Options, arrived, as_kernels_take
from burst_portable.mesh import Mesh
from burst_portable.numerics import as_dtype
from burst_portable.planning.plans import Plan
from burst_portable.runtime import executor
from burst_portable.runtime import head_parallel as by_heads
from burst_portable.runtime.executor import Saved
from burst_portable.runtime.observer import Runtime, installed
from burst_portable.utils.torch_modes import hidden_from_checkpoints, own_precision

_SAVED = 5  # tensors of a group of heads: see `runtime.executor.Saved`
_THERE = nullcontext()


@dataclass(frozen=True, slots=True)
class Call:
    """Everything about one call of attention except its tensors.

    Attributes:
        forward_signature, backward_signature: what the ranks agree on before each pass.
        inboxes: bytes, forward and backward: see `planning.messages.Inboxes`.
        by_out: whether the backward kernel is given out instead of delta.
        with_lse: whether the caller asked for LSE, which then travels home where heads are resharded.
        row_delta: `numerics.row_delta`, or the kernel's own, which is faster.
    """

    plan: Plan
    runtime: Runtime
    options: Options
    forward_signature: CallSignature
    backward_signature: CallSignature
    inboxes: tuple[int, int] = (0, 0)
    by_out: bool = False
    with_lse: bool = True
    row_delta: Callable[[Tensor, Tensor], Tensor] = numerics.row_delta


def _by_blocks(call: Call, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
    """(out in q's dtype, LSE ``[B, Hq, S]`` in the accumulation dtype) of this rank's rows, without a reshard."""
    out, lse = executor.run_forward(call.plan.forward, call.runtime, call.options, q, k, v, sinks)
    return as_dtype(out, q.dtype), lse


class Attention(torch.autograd.Function):
    """Distributed attention with its gradients. Differentiable once."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, call: Call
    ) -> tuple[Tensor, Tensor | None]:
        out, lse, kept = run_forward(call, q, k, v, sinks)
        ctx.save_for_backward(*kept, sinks)
        ctx.call, ctx.number = call, call.runtime.transport.state.passes
        call.runtime.transport.end()
        if lse is not None:
            ctx.mark_non_differentiable(lse)
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, _: Tensor | None) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            _refuse_twice(ctx.call)
        # Read once: recomputing checkpoints hand out each tensor a single time.
        return *run_backward(ctx.call, ctx.number, ctx.saved_tensors, dout), None


def run_forward(
    call: Call, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None
) -> tuple[Tensor, Tensor | None, tuple[Tensor, ...]]:
    """(out, LSE or None, what `run_backward` needs besides the sinks). The caller begins the pass, and ends it."""
    if call.plan.heads:
        out, lse, groups = _by_heads(call, q, k, v, sinks, keep=True)
        return out, lse, tuple(x for group in groups for x in group)
    out, kept = map(_no_view, _by_blocks(call, q, k, v, sinks))
    return out, kept if call.with_lse else None, (q, k, v, out, kept)  # torch spends time on every result


def run_backward(
    call: Call, number: int, saved: Sequence[Tensor | None], dout: Tensor | None
) -> tuple[Tensor | None, ...]:
    """(dq, dk, dv, dsinks): a whole pass.

    Args:
        number: of its forward pass.
        saved: what `run_forward` said, and the sinks.
        dout: None where nothing came of this rank's result.
    """
    tensors = tuple(map(_as_kernels_take_it, saved))
    with own_precision(tensors[0].device):
        begin(call, tensors[0].device, forward_pass=number)
        run = _backward_by_heads if call.plan.heads else _backward_by_blocks
        grads, dsinks = run(call, tensors, dout)
        call.runtime.transport.end()
    return *grads, dsinks


def _no_view(x: Tensor) -> Tensor:
    """A result that may be changed in place: some kernels return views, which torch refuses to change."""
    return x.detach() if x._is_view() else x


def _as_kernels_take_it(x: Any) -> Any:
    """A saved tensor, or None, with strides that kernels take: torch's hooks on saved tensors may give back others."""
    if x is None:
        return None
    return as_kernels_take(x) if x.dim() == 4 else x.contiguous()  # LSE in one piece


def _refuse_twice(call: Call) -> NoReturn:
    """Refuse a backward pass that is itself to be differentiated.

    torch's `once_differentiable` refuses only once that happens, and not always: if autograd.grad is asked for some
    inputs only, second derivatives that pass through attention would silently be left out.
    """
    refusal = UnsupportedError(
        "attention is differentiable once",
        got="a backward pass with create_graph=True",
        next_step="leave create_graph out, or use torch's own attention for second derivatives",
    )
    if call.runtime.transport.size > 1:
        share_error(call.runtime.transport, refusal)
    raise refusal


def _by_heads(
    call: Call, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, *, keep: bool
) -> tuple[Tensor, Tensor | None, list[Saved]]:
    return by_heads.run_forward(
        call.plan, call.runtime, call.options, q, k, v, sinks, with_lse=call.with_lse, keep=keep
    )


def _backward_by_blocks(call: Call, saved: tuple[Any, ...], dout: Tensor | None) -> tuple[Gradients, Tensor | None]:
    q, k, v, out, lse, sinks = saved
    if dout is None:  # this rank's result was not used, but other ranks wait for its part of the pass
        dout = torch.zeros_like(out)
    dout = as_kernels_take(dout)
    row_delta = None if call.by_out else call.row_delta
    delta = None if sinks is None else call.row_delta(dout, out)
    kept = q, k, v, out, lse
    dq, dk, dv = executor.run_backward(call.plan.backward, call.runtime, call.options, dout, kept, row_delta, delta)
    dsinks = None if sinks is None or delta is None else numerics.sinks_gradient(sinks, lse, delta)
    return (as_dtype(dq, q.dtype), as_dtype(dk, q.dtype), as_dtype(dv, q.dtype)), dsinks


def _backward_by_heads(call: Call, saved: tuple[Any, ...], dout: Tensor | None) -> tuple[Gradients, Tensor | None]:
    *tensors, sinks = saved
    groups = [tuple(tensors[i : i + _SAVED]) for i in range(0, len(tensors), _SAVED)]
    if dout is None:
        problem, q = call.plan.call, tensors[0]
        rows = problem.layout.count(call.runtime.transport.rank)
        dout = q.new_zeros((q.shape[0], rows, problem.heads, problem.value_dim))
    row_delta = None if call.by_out else call.row_delta
    return by_heads.run_backward(call.plan, call.runtime, call.options, arrived(dout), groups, sinks, row_delta)


def begin(call: Call, device: torch.device, *, forward_pass: int = 0) -> None:
    """Agree with all ranks on the call, and begin one of its passes.

    device: of the call's tensors.
    forward_pass: for a backward pass, the number of its forward pass.
    """
    transport = call.runtime.transport
    if transport.size == 1:
        return
    stated, inbox = call.forward_signature, call.inboxes[0]
    if forward_pass:
        stated, inbox = call.backward_signature, call.inboxes[1]
    agree(transport, stated, forward_pass=forward_pass)
    with _on(device):
        transport.begin(stated.digest + forward_pass.to_bytes(8, "little"), inbox)


def _on(device: torch.device) -> AbstractContextManager[object]:
    """Make a device the current one: ranks connect on that, and two on the same device would be refused."""
    if device.index is None or device.index == torch.accelerator.current_device_index():
        return _THERE
    return torch.accelerator.device_index(device.index)


def apply(
    call: Call, mesh: Mesh, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """(out ``[B, S, Hq, Dv]``, LSE ``[B, Hq, S]`` or None); tensors are kept only if gradients are required."""
    call = observed(call, mesh)
    wanted = torch.is_grad_enabled() and (
        q.requires_grad or k.requires_grad or v.requires_grad or (sinks is not None and sinks.requires_grad)
    )
    with own_precision(q.device), hidden_from_checkpoints():
        begin(call, q.device)
        if wanted:
            # torch has no types for it
            result: tuple[Tensor, Tensor | None] = Attention.apply(q, k, v, sinks, call)  # type: ignore[no-untyped-call]
            return result
        return run_without_backward(call, q, k, v, sinks)


def observed(call: Call, mesh: Mesh) -> Call:
    """The call with the runtime that is installed, if one is."""
    if (wrap := installed.get()) is None:
        return call
    return replace(call, runtime=wrap(call.runtime, call.plan, mesh))


def run_without_backward(
    call: Call, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """(out, LSE or None), and nothing kept for a backward pass. The pass has begun; it is ended here."""
    if call.plan.heads:
        out, lse, _ = _by_heads(call, q, k, v, sinks, keep=False)
    else:
        out, lse = _by_blocks(call, q, k, v, sinks)
    call.runtime.transport.end()
    return out, lse
