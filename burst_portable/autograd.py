"""The one autograd.Function. What a call needs (plan, runtime, options) is settled in forward and kept for backward."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import torch
from torch import Tensor

from burst_portable import numerics
from burst_portable.comm.agreement import Statement, agree, tell_refusal
from burst_portable.errors import UnsupportedError, explain
from burst_portable.executor import run_backward, run_forward
from burst_portable.kernels.contract import Options
from burst_portable.plans import Plan
from burst_portable.reshard import heads_of, to_heads, to_sequence
from burst_portable.runtime import Runtime, installed

_REFUSAL_DEADLINE = 10.0  # seconds that a rank that refuses to go backward waits for others to hear of it


@dataclass(frozen=True, slots=True)
class Call:
    """Everything about an attention but its tensors; `forward` and `backward` are what ranks agree on."""

    plan: Plan
    runtime: Runtime
    options: Options
    forward: Statement
    backward: Statement
    inboxes: tuple[int, int] = (0, 0)  # bytes that a rank gets from another, forward and backward: see `packets`
    row_delta: Callable[[Tensor, Tensor], Tensor] = numerics.row_delta  # or the kernel's own, in one pass

    @property
    def rank(self) -> int:
        """This rank in the plan's passes: after a reshard each rank has a plan of its own."""
        return 0 if self.plan.reshard else self.runtime.transport.rank


def forward(call: Call, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
    """(out in q's dtype, LSE) of tensors that are sharded as the plan's passes want them."""
    state = run_forward(call.plan.forward, call.rank, call.runtime, call.options, q, k, v)
    if sinks is not None:
        numerics.add_sinks(state, sinks)
    return state[0].to(q.dtype), state[1].to(numerics.accumulation_dtype(q.dtype))


class Attention(torch.autograd.Function):
    """Distributed attention with its gradients. Differentiable once."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, call: Call) -> tuple[Tensor, Tensor]:
        problem, transport = call.plan.problem, call.runtime.transport
        if call.plan.reshard:
            q, k, v = to_heads((q, k, v), problem.q_layout, transport)
            sinks = sinks[heads_of(transport.rank, transport.size, problem.heads)] if sinks is not None else None
        out, lse = forward(call, q, k, v, sinks)
        ctx.save_for_backward(q, k, v, out, lse, sinks)
        ctx.call, ctx.number = call, transport.passes
        if call.plan.reshard:
            out = to_sequence(out, problem.q_layout, transport, problem.heads)
            rows = lse.transpose(1, 2).unsqueeze(-1).contiguous()
            lse = to_sequence(rows, problem.q_layout, transport, problem.heads).squeeze(-1).transpose(1, 2)
        transport.end()
        ctx.mark_non_differentiable(lse)
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, _: Tensor | None) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            _refuse_twice(ctx.call)
        saved = ctx.saved_tensors  # once: checkpointing recomputes them, and gives each away a single time
        with _own_precision(saved[0].device.type):
            return _backward(ctx.call, ctx.number, saved, dout)


def _refuse_twice(call: Call) -> NoReturn:
    """Refuse to be part of a graph of gradients. torch's `once_differentiable` refuses later, and not always: where
    autograd.grad is asked for some inputs, what passes through our gradients would be left out in silence."""
    refusal = UnsupportedError(
        explain(
            "attention is differentiable once",
            got="a backward pass with create_graph=True",
            next_step="leave create_graph out, or use torch's own attention for second derivatives",
        )
    )
    if call.runtime.transport.size > 1:
        tell_refusal(call.runtime.transport, refusal, _REFUSAL_DEADLINE)
    raise refusal


def _backward(call: Call, number: int, saved: tuple[Any, ...], dout: Tensor | None) -> tuple[Tensor | None, ...]:
    problem, transport = call.plan.problem, call.runtime.transport
    q, k, v, out, lse, sinks = saved
    _begin(call, forward=number)
    if dout is None:  # a rank whose result nobody used still takes part: others wait for it
        dout = torch.zeros_like(out) if not call.plan.reshard else None
    if call.plan.reshard:
        shape = (q.shape[0], problem.q_layout.count(transport.rank), problem.heads, v.shape[-1])
        dout = q.new_zeros(shape) if dout is None else dout
        (dout,) = to_heads((dout,), problem.q_layout, transport)
    assert dout is not None
    dout = dout if dout.stride(-1) == 1 else dout.contiguous()
    delta = call.row_delta(dout, out)
    part = call.plan.backward
    grads = run_backward(part, call.rank, call.runtime, call.options, dout, q, k, v, lse, delta)
    dsinks = None
    if sinks is not None:
        dsinks = numerics.sinks_gradient(sinks, lse, delta)
    if call.plan.reshard:
        grads, dsinks = _home(grads, dsinks, call, q.dtype)
    transport.end()
    dq, dk, dv = (g.to(q.dtype) for g in grads)
    return dq, dk, dv, dsinks, None


def _begin(call: Call, *, forward: int = 0) -> None:
    """All ranks make the same call, and a pass of it begins: backward if `forward` is the number of its forward."""
    transport, said = call.runtime.transport, call.backward if forward else call.forward
    agree(transport, said, forward=forward)
    transport.begin(said.digest + forward.to_bytes(8, "little"), call.inboxes[forward > 0])


def _home(
    grads: tuple[Tensor, Tensor, Tensor], dsinks: Tensor | None, call: Call, dtype: torch.dtype
) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor | None]:
    """Gradients of head shards, back to sequence shards."""
    problem, transport = call.plan.problem, call.runtime.transport
    layout, shared = problem.q_layout, problem.kv_heads < transport.size
    dq = to_sequence(grads[0].to(dtype), layout, transport, problem.heads)
    # Ranks that share a K/V head add up their gradients of it, in the accumulation dtype.
    dk, dv = (to_sequence(g if shared else g.to(dtype), layout, transport, problem.kv_heads) for g in grads[1:])
    if dsinks is not None:
        every = dsinks.new_zeros(problem.heads)
        every[heads_of(transport.rank, transport.size, problem.heads)] = dsinks
        dsinks = every
    return (dq, dk, dv), dsinks


def apply(call: Call, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
    """Attention with gradients where any are wanted, and nothing kept where none are."""
    if (wrap := installed.get()) is not None:
        call = replace(call, runtime=wrap(call.runtime, call.plan))
    wanted = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (q, k, v, sinks))
    with _own_precision(q.device.type):
        _begin(call)
        if wanted or call.plan.reshard:
            result: tuple[Tensor, Tensor] = Attention.apply(q, k, v, sinks, call)  # type: ignore[no-untyped-call]
            return result
        plain = forward(call, q, k, v, sinks)
        call.runtime.transport.end()
        return plain


def _own_precision(device_type: str) -> AbstractContextManager[object]:
    """Autocast ends here: it would cut the products inside a kernel down to 16 bits."""
    if torch.is_autocast_enabled(device_type):
        return torch.autocast(device_type, enabled=False)
    return nullcontext()
