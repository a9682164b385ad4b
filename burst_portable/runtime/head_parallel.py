"""Execute passes that exchange tokens for heads before the computation, and back after it (`reshard`).

One group of heads after the other::

    Reshard.to_heads                start sending all rows of the groups' heads to their ranks
    for each group:
        ToHeads.wait                the group has arrived
        executor.forward_rows       attention over all rows (backward_rows in the backward pass)
        Reshard.to_sequence         start sending the results back; the next group computes meanwhile
    ToSequence.wait                 write the results of all groups into the output
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from burst_portable import numerics
from burst_portable.kernels.base import BackwardInputs, arrived
from burst_portable.numerics import accumulation_dtype
from burst_portable.planning.head_division import HeadGroup, HeadRange, heads_of_rank
from burst_portable.runtime.executor import backward_rows, forward_rows
from burst_portable.runtime.prepared_call import Executor, PreparedCall
from burst_portable.runtime.reshard import Reshard, ToSequence

Saved = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
"""The tensors that a group of heads saves: q, k, v, out, LSE."""
_SAVED = 5


class HeadExecutor(Executor):
    """Run passes that exchange tokens for heads before the computation, and back after it (Ulysses, USP)."""

    def forward(
        self, prepared: PreparedCall, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, *, keep: bool
    ) -> tuple[Tensor, Tensor | None, tuple[Tensor, ...]]:
        """See `Executor`. Saves five tensors for each group of heads, over all rows."""
        groups = prepared.plan.split_heads()
        reshard = Reshard(prepared, q.device, backward=False)
        exchanges = [
            reshard.to_heads([(q, g.q_heads), *((x, g.kv_heads) for x in (k, v) if g.brings_kv)]) for g in groups
        ]
        out = q.new_empty((*q.shape[:3], v.shape[-1]))
        lse = q.new_empty((*q.shape[:3], 1), dtype=accumulation_dtype(q.dtype)) if prepared.with_lse else None
        saved: list[Saved] = []
        results: list[ToSequence] = []
        blocks = _with_shared(exchange.wait() for exchange in exchanges)
        for group, exchange, (queries, keys, values) in zip(groups, exchanges, blocks, strict=True):
            heads = _group_heads(prepared, group)
            group_sinks = None if sinks is None else sinks[heads]
            call = prepared.from_head(heads.start)
            group_out, group_lse = forward_rows(call, queries, keys, values, group_sinks)
            group_out = group_out.to(q.dtype)
            parts: list[tuple[Tensor, Tensor, HeadRange]] = [(group_out, out, group.q_heads)]
            if lse is not None:
                parts.append((group_lse.transpose(1, 2).unsqueeze(-1), lse, group.q_heads))
            results.append(reshard.to_sequence(parts, exclusive=group is groups[-1]))
            exchange.wait_sent()
            if keep:
                saved.append((queries, keys, values, group_out, group_lse))
        if keep and not reshard.persistent:  # during the transfer of the last results
            copies = _with_shared(exchange.copies() for exchange in exchanges)
            saved = [(q, k, v, out, lse) for (q, k, v), (_, _, _, out, lse) in zip(copies, saved, strict=True)]
        for result in results:
            result.wait()
        lse = None if lse is None else lse.squeeze(-1).transpose(1, 2)
        return out, lse, tuple(x for group_saved in saved for x in group_saved)

    def backward(
        self, prepared: PreparedCall, saved: Sequence[Tensor], sinks: Tensor | None, dout: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """See `Executor`. dsinks is 0 for heads that other ranks compute."""
        call, groups = prepared.plan.call, prepared.plan.split_heads()
        if dout is None:
            rows = call.layout.count(prepared.transport.rank)
            dout = saved[0].new_zeros((call.batch, rows, call.heads, call.v_head_dim))
        dout = arrived(dout).resolve_neg()  # messages are copies of memory, which has the opposite sign
        reshard = Reshard(prepared, dout.device, backward=True)
        exchanges = [reshard.to_heads([(dout, group.q_heads)]) for group in groups]
        sizes = ((call.heads, call.head_dim), (call.kv_heads, call.head_dim), (call.kv_heads, call.v_head_dim))
        dq, dk, dv = (dout.new_empty((*dout.shape[:2], *size)) for size in sizes)
        dsinks = None if sinks is None else torch.zeros_like(sinks)
        results: list[ToSequence] = []
        dkv: list[Tensor] = []  # dK and dV, to which several groups may contribute
        groups_saved = (saved[i : i + _SAVED] for i in range(0, len(saved), _SAVED))
        for group, exchange, (q, k, v, out, lse) in zip(groups, exchanges, groups_saved, strict=True):
            (group_dout,) = exchange.wait()
            heads = _group_heads(prepared, group)
            inputs = BackwardInputs(group_dout, q, k, v, lse, out)
            group_dq, *group_dkv = backward_rows(prepared.from_head(heads.start), inputs)
            if not group.brings_kv:
                group_dkv = [a.to(accumulation_dtype(a.dtype)) + b for a, b in zip(dkv, group_dkv, strict=True)]
            dkv = group_dkv
            parts: list[tuple[Tensor, Tensor, HeadRange]] = [(group_dq, dq, group.q_heads)]
            if group.returns_kv:
                parts += [(dkv[0], dk, group.kv_heads), (dkv[1], dv, group.kv_heads)]
            results.append(reshard.to_sequence(parts, exclusive=group is groups[-1]))
            exchange.wait_sent()
            if sinks is not None and dsinks is not None:
                dsinks[heads] = numerics.sinks_gradient(sinks[heads], lse, numerics.row_delta(group_dout, out))
        for result in results:
            result.wait()
        return dq, dk, dv, dsinks


def _group_heads(prepared: PreparedCall, group: HeadGroup) -> slice:
    """Return the group's heads among all query heads."""
    plan, split = prepared.plan, prepared.plan.heads
    assert split is not None, "heads are divided"
    start = heads_of_rank(split.index(prepared.transport.rank), split.ranks, plan.call.heads).start
    return slice(start + group.q_heads[0], start + group.q_heads[1])


def _with_shared(received: Iterable[list[Tensor]]) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yield (q, k, v) of each group, as they arrive. K and V that several groups share arrive with the first group."""
    shared: list[Tensor] = []
    for queries, *kv in received:
        shared = kv or shared
        assert shared, "K and V arrive with the first group that reads them"
        keys, values = shared
        yield queries, keys, values
