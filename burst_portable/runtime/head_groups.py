"""Execute passes whose heads are computed in groups, each of which sends its own blocks.

All groups run the same steps, each group one step later than the group before it (`schedule.interleave_groups`). So the
blocks of a group arrive while the group before it computes::

    kernel      |  wait  |  group 0  |     group 1      |     group 2      |
    links       | 0 in   | 1 in      | 2 in, gradients of 0 out            |
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from burst_portable import numerics
from burst_portable.kernels.base import BackwardInputs, Gradients, as_kernels_take
from burst_portable.numerics import State, accumulation_dtype
from burst_portable.planning.messages import StepMessages
from burst_portable.planning.schedule import Step, interleave_groups
from burst_portable.runtime.executor import BackwardSteps, ForwardSteps, backward_rows, forward_rows
from burst_portable.runtime.prepared_call import Executor, PreparedCall, PreparedPass

Result = TypeVar("Result", covariant=True)


class GroupExecutor(Executor):
    """Run passes that send blocks of the sequence for one group of heads at a time."""

    def forward(
        self, prepared: PreparedCall, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, *, keep: bool
    ) -> tuple[Tensor, Tensor | None, tuple[Tensor, ...]]:
        """See `Executor`."""
        batch, rows, heads, _ = q.shape
        out = q.new_empty((batch, rows, heads, v.shape[-1]))
        lse = q.new_empty((batch, heads, rows), dtype=accumulation_dtype(q.dtype))
        for group, state in enumerate(_forward_groups(prepared, q, k, v, sinks)):
            some, _ = _heads(prepared, group)
            out[:, :, some], lse[:, some] = state
        return out, lse if prepared.with_lse else None, (q, k, v, out, lse)

    def backward(
        self, prepared: PreparedCall, saved: Sequence[Tensor], sinks: Tensor | None, dout: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """See `Executor`."""
        q, k, v, out, lse = saved
        dout = torch.zeros_like(out) if dout is None else as_kernels_take(dout)
        takes_delta = prepared.backward.single is None and not prepared.backward_takes_out
        delta = prepared.kernel.row_delta(dout, out) if takes_delta or sinks is not None else None
        dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
        inputs = BackwardInputs(dout, q, k, v, lse, None if takes_delta else out, delta if takes_delta else None)
        for group, (group_dq, group_dk, group_dv) in enumerate(_backward_groups(prepared, inputs)):
            some, keys = _heads(prepared, group)
            dq[:, :, some], dk[:, :, keys], dv[:, :, keys] = group_dq, group_dk, group_dv
        dsinks = None if sinks is None or delta is None else numerics.sinks_gradient(sinks, lse, delta)
        return dq, dk, dv, dsinks


def _heads(prepared: PreparedCall, group: int) -> tuple[slice, slice]:
    """Return the query heads and the K/V heads of a group."""
    heads, kv_heads = prepared.kernel_call.heads, prepared.kernel_call.kv_heads
    return slice(group * heads, (group + 1) * heads), slice(group * kv_heads, (group + 1) * kv_heads)


def _calls(prepared: PreparedCall) -> list[PreparedCall]:
    """Return the call of each group of heads."""
    return [prepared.from_head(group * prepared.kernel_call.heads) for group in range(prepared.plan.head_groups)]


def _forward_groups(prepared: PreparedCall, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> Iterator[State]:
    """Yield (out, LSE) of each group of heads in turn."""
    parts = []
    for group in range(prepared.plan.head_groups):
        some, keys = _heads(prepared, group)
        parts.append((q[:, :, some], k[:, :, keys], v[:, :, keys], None if sinks is None else sinks[some]))
    calls = _calls(prepared)
    if prepared.forward.single:  # no messages
        yield from (forward_rows(call, *part) for call, part in zip(calls, parts, strict=True))
        return

    def begin(group: int) -> ForwardSteps:  # sinks are merged before out is rounded
        return ForwardSteps(calls[group], *parts[group][:3], may_round=sinks is None, round_index=group)

    for (*_, group_sinks), state in zip(parts, _run_groups(prepared, prepared.forward, begin), strict=True):
        if group_sinks is not None:
            numerics.add_sinks(state, group_sinks)
        yield state


def _backward_groups(prepared: PreparedCall, x: BackwardInputs) -> Iterator[Gradients]:
    """Yield (dq, dk, dv) of each group of heads in turn."""

    def inputs(group: int) -> BackwardInputs:
        some, keys = _heads(prepared, group)
        return BackwardInputs(
            x.dout[:, :, some],
            x.q[:, :, some],
            x.k[:, :, keys],
            x.v[:, :, keys],
            x.lse[:, some].contiguous(),  # as kernels require
            None if x.out is None else x.out[:, :, some],
            None if x.delta is None else x.delta[:, some].contiguous(),
        )

    calls = _calls(prepared)
    if prepared.backward.single:
        yield from (backward_rows(call, inputs(group)) for group, call in enumerate(calls))
    else:
        yield from _run_groups(
            prepared, prepared.backward, lambda group: BackwardSteps(calls[group], inputs(group), group)
        )


class _GroupSteps(Protocol[Result]):
    """The steps of one group of heads in a pass."""

    def run(self, step: Step, messages: StepMessages) -> None:
        """Run the next step."""

    def finish(self) -> Result:
        """Return the results after all steps."""


def _run_groups(
    prepared: PreparedCall, prepared_pass: PreparedPass, begin: Callable[[int], _GroupSteps[Result]]
) -> Iterator[Result]:
    """Run the steps of all groups of heads, and yield the results of each group when it has finished.

    `begin` returns the steps of a group. It is called when the group runs its first step.
    """
    groups, messages = prepared.plan.head_groups, prepared_pass.messages
    of_step = {step.index: step_messages for step, step_messages in messages.steps}
    steps, running = tuple(step for step, _ in messages.steps), dict[int, _GroupSteps[Result]]()
    for group, step in interleave_groups(steps, groups):
        if group not in running:
            running[group] = begin(group)
        running[group].run(step, of_step[step.index])
        if step is steps[-1]:
            yield running.pop(group).finish()
    if not steps:
        yield from (begin(group).finish() for group in range(groups))
