"""Runs one rank's part of a plan whose heads are resharded (Ulysses): one loop over groups of heads.

::

    all groups      send rows away, receive those of other ranks
    each group      what arrives   ->   compute   ->   send what was made of it home
    all groups      what comes home

While the kernel works on a group, what the next ones need arrives, and what was made of the last ones leaves.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from burst_portable import numerics
from burst_portable.heads import HeadGroup, Span, heads_of
from burst_portable.kernels.contract import Gradients, Options
from burst_portable.numerics import State, accumulation_dtype, as_dtype
from burst_portable.plans import Compute, PassPlan, Plan
from burst_portable.reshard import Reshard, ToHeads, ToSequence
from burst_portable.runtime import Runtime

Saved = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
"""What backward needs of a group: its q, k, v, out and LSE, over all rows."""


def run_forward(
    plan: Plan,
    runtime: Runtime,
    options: Options,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    *,
    with_lse: bool,
    keep: bool,
) -> tuple[Tensor, Tensor | None, list[Saved]]:
    """(out in q's dtype, LSE if it is asked for, what backward needs if it is to be kept) of this rank's rows.

    q, k and v hold all heads of this rank's rows, ``[B, S_rank, H, D]``, as out does; LSE is ``[B, H, S_rank]``. What
    is kept holds all rows of this rank's heads.
    """
    reshard, groups = Reshard(plan, runtime, q.device, backward=False), plan.head_groups
    coming = [reshard.to_heads([(q, g.queries), *((x, g.keys) for x in (k, v) if g.first)]) for g in groups]
    out = q.new_empty((*q.shape[:3], v.shape[-1]))
    lse = q.new_empty((*q.shape[:3], 1), dtype=accumulation_dtype(q.dtype)) if with_lse else None
    saved: list[Saved] = []
    leaving: list[ToSequence] = []
    arrived = _with_shared(arriving.wait() for arriving in coming)
    copies = keep and not reshard.lasting
    for group, arriving, (queries, keys, values) in zip(groups, coming, arrived, strict=True):
        if copies:  # beside the kernel
            arriving.keep()
        part, part_lse = attend(
            plan.forward, runtime, options, queries, keys, values, _own(sinks, plan, group, runtime)
        )
        part = part.to(q.dtype)
        home: list[tuple[Tensor, Tensor, Span]] = [(part, out, group.queries)]
        if lse is not None:
            home.append((part_lse.transpose(1, 2).unsqueeze(-1), lse, group.queries))
        leaving.append(reshard.to_sequence(home, alone=group is groups[-1]))
        arriving.left()
        if keep:
            saved.append((queries, keys, values, part, part_lse))
    if copies:
        saved = _copied(saved, coming)
    for part_home in leaving:
        part_home.wait()
    return out, None if lse is None else lse.squeeze(-1).transpose(1, 2), saved


def run_backward(
    plan: Plan,
    runtime: Runtime,
    options: Options,
    dout: Tensor,
    saved: Sequence[Saved],
    sinks: Tensor | None,
) -> tuple[Gradients, Tensor | None]:
    """((dq, dk, dv) of this rank's rows in dout's dtype, and this rank's share of the gradient of sinks)."""
    problem, groups = plan.problem, plan.head_groups
    reshard = Reshard(plan, runtime, dout.device, backward=True)
    coming = [reshard.to_heads([(dout, group.queries)]) for group in groups]
    sizes = (
        (problem.heads, problem.head_dim),
        (problem.kv_heads, problem.head_dim),
        (problem.kv_heads, problem.value_dim),
    )
    dq, dk, dv = (dout.new_empty((*dout.shape[:2], *size)) for size in sizes)
    dsinks = None if sinks is None else torch.zeros_like(sinks)
    leaving: list[ToSequence] = []
    shared: tuple[Tensor, ...] = ()  # gradients of K and V that several groups add to
    for group, arriving, kept in zip(groups, coming, saved, strict=True):
        (part_dout,) = arriving.wait()
        part_dq, *pair = gradients(plan.backward, runtime, options, part_dout, kept)
        shared = tuple(pair) if group.first else _sum(shared, pair)
        home: list[tuple[Tensor, Tensor, Span]] = [(part_dq, dq, group.queries)]
        if group.last:
            home += [(shared[0], dk, group.keys), (shared[1], dv, group.keys)]
        leaving.append(reshard.to_sequence(home, alone=group is groups[-1]))
        arriving.left()
        if sinks is not None and dsinks is not None:
            mine, (*_, out, lse) = _own_heads(plan, group, runtime), kept
            dsinks[mine] = numerics.sinks_gradient(sinks[mine], lse, numerics.row_delta(part_dout, out))
    for part_home in leaving:
        part_home.wait()
    return (dq, dk, dv), dsinks


def attend(
    pass_plan: PassPlan, runtime: Runtime, options: Options, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None
) -> State:
    """(out in q's dtype or wider, LSE in the accumulation dtype) of all rows of some heads."""
    compute = _only(pass_plan)
    state = numerics.empty_state(q, v.shape[-1]) if compute is None else runtime.attend_whole(compute, q, k, v, options)
    if sinks is not None:
        state = numerics.finished(state, q.dtype)
        numerics.add_sinks(state, sinks)
    return state[0], as_dtype(state[1], accumulation_dtype(q.dtype))


def gradients(pass_plan: PassPlan, runtime: Runtime, options: Options, dout: Tensor, kept: Saved) -> Gradients:
    """(dq, dk, dv) of all rows of some heads, in q's dtype or the accumulation dtype."""
    q, k, v, out, lse = kept
    compute = _only(pass_plan)
    if compute is None:
        return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    return runtime.gradients(compute, (dout, q, k, v, out, lse), options)


def _only(pass_plan: PassPlan) -> Compute | None:
    """The computation of a pass that one rank plans for itself; None where the mask hides everything."""
    return next((step.compute for step in pass_plan.steps_of(0)), None)


def _sum(total: Sequence[Tensor], parts: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Gradients of shared K/V heads are added in the accumulation dtype."""
    return tuple(a.to(accumulation_dtype(a.dtype)) + b for a, b in zip(total, parts, strict=True))


def _own_heads(plan: Plan, group: HeadGroup, runtime: Runtime) -> slice:
    """The group's heads among all query heads."""
    start = heads_of(runtime.transport.rank, plan.problem.ranks, plan.problem.heads).start
    return slice(start + group.queries[0], start + group.queries[1])


def _own(sinks: Tensor | None, plan: Plan, group: HeadGroup, runtime: Runtime) -> Tensor | None:
    return None if sinks is None else sinks[_own_heads(plan, group, runtime)]


def _copied(saved: Sequence[Saved], came: Sequence[ToHeads]) -> list[Saved]:
    """The same, with q, k and v in memory that stays; K and V that several groups share are copied once."""
    stays = _with_shared(arrived.kept() for arrived in came)
    return [(q, k, v, out, lse) for (q, k, v), (_, _, _, out, lse) in zip(stays, saved, strict=True)]


def _with_shared(arrived: Iterable[list[Tensor]]) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """(q, k, v) of each group, as they come. K and V that several groups share come with the first one."""
    pair: list[Tensor] = []
    for queries, *own in arrived:
        pair = own or pair
        assert pair, "K and V come with the first group that reads them"
        keys, values = pair
        yield queries, keys, values
