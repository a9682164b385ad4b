"""Runs one pass of one rank where heads are resharded (Ulysses, USP): one loop over groups of heads.

::

    all groups      start: send my rows to the ranks that compute with them, receive other ranks' rows
    each group      wait for its rows   ->   compute   ->   start: send the results home
    all groups      wait for the results that come home

While the kernel computes one group, rows of later groups arrive and results of earlier groups leave. Computing is one
launch if all ranks divide the heads among them; if the ranks of a node do, it is the steps of a ring between nodes
(`executor`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from burst_portable import executor, numerics
from burst_portable.executor import RowDelta, Saved
from burst_portable.heads import HeadGroup, Span, heads_of
from burst_portable.kernels.contract import Gradients, Options
from burst_portable.numerics import accumulation_dtype
from burst_portable.plans import Plan
from burst_portable.reshard import Reshard, ToHeads, ToSequence
from burst_portable.runtime import Runtime


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
    """(out, LSE, saved) of this rank's rows.

    Args:
        q, k, v: all heads of this rank's rows, ``[B, S_rank, H, D]``.
        sinks: ``[Hq]``, one logit per query head, or None.
        with_lse: whether the caller wants LSE, which then travels home.
        keep: whether backward will run.

    Returns:
        out ``[B, S_rank, Hq, Dv]`` in q's dtype; LSE ``[B, Hq, S_rank]`` in the accumulation dtype, or None; for each
        group of heads, what `run_backward` needs, over all rows, or an empty list.
    """
    reshard, groups = Reshard(plan, runtime, q.device, backward=False), plan.head_groups
    coming = [reshard.to_heads([(q, g.queries), *((x, g.keys) for x in (k, v) if g.first)]) for g in groups]
    out = q.new_empty((*q.shape[:3], v.shape[-1]))
    lse = q.new_empty((*q.shape[:3], 1), dtype=accumulation_dtype(q.dtype)) if with_lse else None
    saved: list[Saved] = []
    leaving: list[ToSequence] = []
    arrived = _with_shared(arriving.wait() for arriving in coming)
    for group, arriving, (queries, keys, values) in zip(groups, coming, arrived, strict=True):
        group_sinks = None if sinks is None else sinks[_own_heads(plan, group, runtime)]
        group_out, group_lse = executor.run_forward(plan.forward, runtime, options, queries, keys, values, group_sinks)
        group_out = group_out.to(q.dtype)
        home: list[tuple[Tensor, Tensor, Span]] = [(group_out, out, group.queries)]
        if lse is not None:
            home.append((group_lse.transpose(1, 2).unsqueeze(-1), lse, group.queries))
        leaving.append(reshard.to_sequence(home, alone=group is groups[-1]))
        arriving.left()
        if keep:
            saved.append((queries, keys, values, group_out, group_lse))
    if keep and not reshard.lasting:  # while the last results leave
        saved = _copied(saved, coming)
    for results in leaving:
        results.wait()
    return out, None if lse is None else lse.squeeze(-1).transpose(1, 2), saved


def run_backward(
    plan: Plan,
    runtime: Runtime,
    options: Options,
    dout: Tensor,
    saved: Sequence[Saved],
    sinks: Tensor | None,
    row_delta: RowDelta | None,
) -> tuple[Gradients, Tensor | None]:
    """((dq, dk, dv), dsinks) of this rank's rows.

    Args:
        dout: ``[B, S_rank, Hq, Dv]``.
        saved: what `run_forward` kept.
        row_delta: None if the kernel is given out instead of delta.

    Returns:
        dq, dk, dv: ``[B, S_rank, H, D]`` in dout's dtype; dsinks: ``[Hq]``, from the rows of the heads that this rank
        computes, 0 for other heads; None without sinks.
    """
    p, groups = plan.problem, plan.head_groups
    reshard = Reshard(plan, runtime, dout.device, backward=True)
    coming = [reshard.to_heads([(dout, group.queries)]) for group in groups]
    sizes = ((p.heads, p.head_dim), (p.kv_heads, p.head_dim), (p.kv_heads, p.value_dim))
    dq, dk, dv = (dout.new_empty((*dout.shape[:2], *size)) for size in sizes)
    dsinks = None if sinks is None else torch.zeros_like(sinks)
    leaving: list[ToSequence] = []
    dkv: tuple[Tensor, ...] = ()  # of K and V, which several groups may share
    for group, arriving, kept in zip(groups, coming, saved, strict=True):
        (group_dout,) = arriving.wait()
        group_dq, *group_dkv = executor.run_backward(plan.backward, runtime, options, group_dout, kept, row_delta)
        dkv = tuple(group_dkv) if group.first else _sum(dkv, group_dkv)
        home: list[tuple[Tensor, Tensor, Span]] = [(group_dq, dq, group.queries)]
        if group.last:
            home += [(dkv[0], dk, group.keys), (dkv[1], dv, group.keys)]
        leaving.append(reshard.to_sequence(home, alone=group is groups[-1]))
        arriving.left()
        if sinks is not None and dsinks is not None:
            mine, (*_, out, lse) = _own_heads(plan, group, runtime), kept
            dsinks[mine] = numerics.sinks_gradient(sinks[mine], lse, numerics.row_delta(group_dout, out))
    for results in leaving:
        results.wait()
    return (dq, dk, dv), dsinks


def _sum(total: Sequence[Tensor], parts: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The elements of total + parts, in the accumulation dtype."""
    return tuple(a.to(accumulation_dtype(a.dtype)) + b for a, b in zip(total, parts, strict=True))


def _own_heads(plan: Plan, group: HeadGroup, runtime: Runtime) -> slice:
    """The group's heads among all query heads."""
    start = heads_of(runtime.transport.rank % plan.inner, plan.inner, plan.problem.heads).start
    return slice(start + group.queries[0], start + group.queries[1])


def _copied(saved: Sequence[Saved], came: Sequence[ToHeads]) -> list[Saved]:
    """The same, with q, k and v in memory of their own; K and V that several groups share are copied once."""
    copies = _with_shared(group.kept() for group in came)
    return [(q, k, v, out, lse) for (q, k, v), (_, _, _, out, lse) in zip(copies, saved, strict=True)]


def _with_shared(arrived: Iterable[list[Tensor]]) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """(q, k, v) of each group, as they arrive. K and V that several groups share arrive with the first."""
    pair: list[Tensor] = []
    for queries, *own in arrived:
        pair = own or pair
        assert pair, "K and V come with the first group that reads them"
        keys, values = pair
        yield queries, keys, values
