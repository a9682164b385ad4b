"""From sequence shards to head shards and back: the all-to-alls around Ulysses, among all ranks or those of a node.

::

    rank:      0      1                     0      1
    rows  A   AaAb                  heads  Aa Ba   Ab Bb        (letters: rows; small ones: heads)
          B          BaBb

To heads: for a group of heads a rank gets one message from every other rank, with the rows of all tensors side by side.
The sender packs each tensor in one copy, or sends it from where it lies (`Transport.supports_strided_sends`). What
arrives lies rank after rank, and is used in place if the plan takes rows in that order
(`planning.row_order.with_rank_order`).

Back: one message per tensor, sent as the kernel left it if its rows already lie in the order of ranks; the receiver
puts the ranks' heads together in one copy. Every exchange runs in the background until it is waited for.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import lru_cache
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from burst_portable import numerics
from burst_portable.comm.base import Exchange, Part, Parts, Strip, Strips
from burst_portable.kernels.base import BackwardInputs, arrived
from burst_portable.layout import Layout, Segment
from burst_portable.numerics import accumulation_dtype
from burst_portable.planning.cost import STRIDED_BATCHES
from burst_portable.planning.messages import Field, head_room
from burst_portable.planning.plans import HeadGroup, HeadRange, heads_of_rank
from burst_portable.runtime.executor import backward_rows, forward_rows
from burst_portable.runtime.prepared_call import Executor, PreparedCall

_RUNS = 64  # fewer runs of rows than this are put together by `cat`, more by their indices
_APART = (1 << 31) - 1  # the most bytes from one line to the next that copy engines take


class Reshard:
    """The all-to-alls of one pass on one rank. All ranks begin the same ones, in the same order.

    Each is among the `Plan.head_parallel_size` ranks that divide the heads; their places count from 0. `at` is where
    bytes begin in an inbox.
    """

    def __init__(self, prepared: PreparedCall, device: torch.device, *, backward: bool) -> None:
        self.plan, self.transport, self.device = prepared.plan, prepared.transport, device
        self._observer, self._backward = prepared.observer, backward
        plan = self.plan
        layout, self.size = plan.call.layout, plan.head_parallel_size
        node, self.place = divmod(self.transport.rank, self.size)
        self.first = node * self.size  # the rank of place 0
        self.rows = tuple(layout.count(self.first + place) for place in range(self.size))
        self.starts = _starts(self.rows)
        self._order = tuple((self.place + distance) % self.size for distance in range(1, self.size + 1))
        self.to_ranks, self.to_plan = row_orders(layout, plan.forward.call.layout, node, device)
        self._at = 0  # of the next exchange, in every rank's inbox
        self._begun = False

    @property
    def persistent(self) -> bool:
        """Whether tensors that arrived stay unchanged after the pass."""
        return self.to_plan is not None or self.transport.persistent_inbox

    def copying(self) -> AbstractContextManager[object]:
        """A context around packing and unpacking, for the profiler."""
        return self._observer.copies(self.device, 0, backward=self._backward)

    def to_heads(self, parts: Sequence[tuple[Tensor, HeadRange]]) -> ToHeads:
        """Start bringing all rows of some of this rank's heads here, of tensors ``[B, S_rank, H, D]`` of one dtype."""
        like = parts[0][0]
        fields = [Field(past - first, x.shape[3], x.itemsize) for x, (first, past) in parts]
        row = sum(field.size(like.shape[0]) for field in fields)
        inbox, at = self._inbox(self.starts[-1] * row, row, back=False)
        whole = inbox.view(like.dtype).view(self.starts[-1], -1)
        there, here = _parts_to_heads(self._order, self.first, self.rows, row, at)
        leaving: list[Parts | Strips] = []
        if self.transport.supports_strided_sends and all(can_be_picked(x) for x, _ in parts):
            at += self.starts[self.place] * row  # this rank's rows are behind those of ranks before it
            for (x, heads), field in zip(parts, fields, strict=True):
                strips = _strips(self._order, self.first, x.shape, x.stride(), x.itemsize, heads, at, row)
                leaving.append(Strips(x, strips))
                at += field.size(like.shape[0])
        else:
            leaving.append(Parts(self._packed(parts, fields, row), there))
        alone, self._begun = not self._begun, True
        exchange = self.transport.exchange(leaving, [Parts(inbox, here)], "to heads", alone=alone)
        with self.copying():
            exchange.copy_own()
        return ToHeads(self, exchange, whole, fields, like.shape[0], leaving)

    def _packed(self, parts: Sequence[tuple[Tensor, HeadRange]], fields: Sequence[Field], row: int) -> Tensor:
        """``[ranks, S_rank, row]``: for each rank its heads; `row` in bytes."""
        like = parts[0][0]
        packed = like.new_empty(self.size, like.shape[1], row // like.itemsize)
        with self.copying():
            for (x, heads), into in zip(parts, _fields(packed, fields, like.shape[0]), strict=True):
                owned = _of_owners(x, min(len(packed), x.shape[2]), heads)
                if len(owned) == len(packed):
                    numerics.copy(owned, into)
                else:  # several ranks share an owner's heads
                    numerics.copy(owned.unsqueeze(1), into.view(len(owned), -1, *into.shape[1:]))
        return packed

    def to_sequence(self, parts: Sequence[tuple[Tensor, Tensor, HeadRange]], *, alone: bool) -> ToSequence:
        """Start bringing home what was computed for some heads.

        Args:
            parts: for each tensor ``[B, S_all, h, D]``: the tensor, the result ``[B, S_rank, H, D]`` that it is written
                into, and which of this rank's heads it holds. Contributions of several ranks to a shared head are
                added up.
            alone: whether no kernel runs after it.
        """
        size, mine = self.size, self.rows[self.place]
        leaving, arriving, came = [], [], []
        for x, result, heads in parts:
            shared = result.shape[2] < size  # by several ranks, whose contributions go home wide and are added up there
            with self.copying():
                made = self._rows_first(x, accumulation_dtype(x.dtype) if shared else result.dtype)
            row = made[0].numel() * made.itemsize
            inbox, at = self._inbox(size * mine * row, row, back=True)
            there, here = _parts_to_sequence(self._order, self.first, self.rows, row, at)
            leaving.append(Parts(made, there))
            arriving.append(Parts(inbox, here))
            came.append((inbox.view(made.dtype).view(size, mine, *made.shape[1:]), result, heads))
        exchange = self.transport.exchange(leaving, arriving, "to sequence", alone=alone)
        return ToSequence(self, exchange, came, leaving)

    def _inbox(self, size: int, row: int, *, back: bool) -> tuple[Tensor, int]:
        """An inbox of `size` bytes, and the byte at which it begins; every rank counts bytes in the same way."""
        at = self._at
        self._at += head_room(self.plan, row, back=back)
        return self.transport.inbox(size, self.device, self.transport.rank, at), at

    def _rows_first(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """``[B, S_all, h, D]`` -> ``[S_all, B, h, D]``, contiguous, rank after rank."""
        rows = x.transpose(0, 1).to(dtype, memory_format=torch.contiguous_format)
        return rows.contiguous() if self.to_ranks is None else self.to_ranks(rows)


class ToHeads:
    """All rows of some heads, on their way to this rank, and what it sends of its own rows."""

    def __init__(
        self,
        reshard: Reshard,
        exchange: Exchange,
        came: Tensor,
        fields: Sequence[Field],
        batch: int,
        sends: list[Parts | Strips],
    ) -> None:
        self._reshard, self._exchange, self._sends = reshard, exchange, sends
        self._came, self._fields, self._batch = came, fields, batch

    def wait(self) -> list[Tensor]:
        """The tensors, ``[B, S_all, h, D]``, rows in the plan's order; in the inbox if that is the order of ranks."""
        self._exchange.wait()
        return _tensors(self._in_order(), self._fields, self._batch)

    def kept(self) -> list[Tensor]:
        """What `wait` returned, in memory that stays after the pass."""
        with self._reshard.copying():
            return _tensors(self._came.clone(), self._fields, self._batch)

    def _in_order(self) -> Tensor:
        put = self._reshard.to_plan
        if put is None:
            return self._came
        with self._reshard.copying():
            return put(self._came)

    def wait_sent(self) -> None:
        """Release what was sent, once it has left."""
        self._exchange.wait_sent()
        self._sends.clear()


class ToSequence:
    """Parts of results on their way home."""

    def __init__(
        self, reshard: Reshard, exchange: Exchange, came: list[tuple[Tensor, Tensor, HeadRange]], sends: list[Parts]
    ) -> None:
        self._reshard, self._exchange, self._came, self._sends = reshard, exchange, came, sends

    def wait(self) -> None:
        """Write what arrives into the results; this rank's own part is copied while other parts are on their way."""
        with self._reshard.copying():
            self._exchange.copy_own()
        self._exchange.wait()
        with self._reshard.copying():
            for pieces, result, heads in self._came:
                owners = min(len(pieces), result.shape[2])
                if owners < len(pieces):  # [ranks, S, B, h, D] -> [heads, S, B, 1, D]
                    pieces = pieces.view(owners, -1, *pieces.shape[1:]).sum(1)
                numerics.copy(pieces, _of_owners(result, owners, heads))
        self._exchange.wait_sent()
        self._came.clear()
        self._sends.clear()


BothWays = tuple[tuple[Part, ...], tuple[Part, ...]]
"""(parts that leave, parts that arrive)."""


@lru_cache(maxsize=512)
def _parts_to_heads(order: tuple[int, ...], first: int, rows: tuple[int, ...], row: int, at: int) -> BothWays:
    """The messages of the last rank of `order`: its packed rows for each rank; all rows of its heads, rank after rank.

    Args:
        order: places of ranks; place 0 is the rank `first`.
        rows: how many rows each of them holds.
        row: bytes of a row.
        at: where the exchange begins in every inbox.
    """
    me, starts = order[-1], _starts(rows)
    each, mine = rows[me] * row, at + starts[me] * row
    there = tuple(Part(first + p, p * each, (p + 1) * each, mine) for p in order)
    return there, tuple(Part(first + p, starts[p] * row, starts[p + 1] * row, at + starts[p] * row) for p in order)


def can_be_picked(x: Tensor) -> bool:
    """Return whether a copy engine can send a tensor.

    The heads of a row form one line, lines do not overlap (as they do in an expanded tensor) and are not too far apart,
    and the batch is small.
    """
    batch, rows, heads, dim = x.shape
    lines = x.stride(3) == 1 and (x.stride(2) == dim or heads == 1)
    return lines and batch <= STRIDED_BATCHES and (rows == 1 or heads * dim <= x.stride(1) <= _APART // x.itemsize)


@lru_cache(maxsize=512)
def _strips(
    order: tuple[int, ...],
    first: int,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    itemsize: int,
    heads: HeadRange,
    at: int,
    row: int,
) -> tuple[Strip, ...]:
    """The strips of a tensor ``[B, S_rank, H, D]`` whose heads are divided among the ranks in `order`.

    Args:
        order, first: as in `_parts_to_heads`.
        heads: which of the heads of each rank are sent.
        at: the byte in the receivers' inboxes at which the first row of these heads begins.
        row: bytes from one row to the next there.
    """
    batch, rows, count, dim = shape
    owners = min(len(order), count)
    width, strips = (heads[1] - heads[0]) * dim * itemsize, []
    step = strides[1] * itemsize if rows > 1 else width  # of a single row it may be any
    for p in order:
        head = p * owners // len(order) * (count // owners) + heads[0]
        for b in range(batch):
            start = (b * strides[0] + head * strides[2]) * itemsize
            strips.append(Strip(first + p, start, at + b * width, rows, width, step, row))
    return tuple(strips)


@lru_cache(maxsize=512)
def _parts_to_sequence(order: tuple[int, ...], first: int, rows: tuple[int, ...], row: int, at: int) -> BothWays:
    """The same on the way back: to each rank its rows; from each rank what it computed for this rank's rows."""
    me, starts = order[-1], _starts(rows)
    mine = rows[me] * row
    there = tuple(Part(first + p, starts[p] * row, starts[p + 1] * row, at + me * rows[p] * row) for p in order)
    return there, tuple(Part(first + p, p * mine, (p + 1) * mine, at + p * mine) for p in order)


def _starts(rows: Sequence[int]) -> tuple[int, ...]:
    """Where each rank's rows begin, and where all end."""
    return tuple(accumulate(rows, initial=0))


def _fields(rows: Tensor, fields: Sequence[Field], batch: int) -> list[Tensor]:
    """``[ranks, S, row]``, contiguous -> of each field a view ``[ranks, S, B, h, D]``."""
    ranks, count, row = rows.shape
    return [
        rows.as_strided((ranks, count, batch, heads, dim), (count * row, row, heads * dim, dim, 1), at)
        for heads, dim, at in _lying(rows, fields, batch)
    ]


def _tensors(rows: Tensor, fields: Sequence[Field], batch: int) -> list[Tensor]:
    """``[S, row]``, contiguous -> of each field a view ``[B, S, h, D]``."""
    count, row = rows.shape
    return [
        rows.as_strided((batch, count, heads, dim), (heads * dim, row, dim, 1), at)
        for heads, dim, at in _lying(rows, fields, batch)
    ]


def _lying(rows: Tensor, fields: Sequence[Field], batch: int) -> Iterator[tuple[int, int, int]]:
    """(heads, head size, element where its first row begins) of each field."""
    at = int(rows.storage_offset())
    for field in fields:
        yield field.heads, field.dim or 1, at
        at += field.size(batch) // rows.itemsize


def _of_owners(x: Tensor, owners: int, heads: HeadRange) -> Tensor:
    """``[B, S, H, D]`` -> a view ``[owners, S, B, h, D]``: of each owner's heads, the span `heads`."""
    batch, rows, count, dim = x.shape
    step_batch, step_row, step_head, step = x.stride()
    return x.as_strided(
        (owners, rows, batch, heads[1] - heads[0], dim),
        (count // owners * step_head, step_row, step_batch, step_head, step),
        x.storage_offset() + heads[0] * step_head,
    )


class _Order:
    """Puts rows into another order: by `cat` if there are few runs, which is faster, else by indices."""

    def __init__(self, index: Tensor, runs: Sequence[tuple[int, int]], device: torch.device) -> None:
        self._runs = runs
        self._index = None if runs else index.to(device)

    def __call__(self, x: Tensor) -> Tensor:
        if self._index is not None:
            return x.index_select(0, self._index)
        return torch.cat([x[start:stop] for start, stop in self._runs])


@lru_cache(maxsize=64)
def row_orders(layout: Layout, within: Layout, node: int, device: torch.device) -> tuple[_Order | None, _Order | None]:
    """Return the orders from the plan's rows to those of the ranks, and back; (None, None) if they are the same.

    Args:
        layout, within: who holds which rows before the reshard, and after it, when a member has the rows of its node.
        node: the node whose rows are put in order.
    """
    came = layout.joined(layout.ranks // within.ranks).shards[node]
    if within.shards[node] == came:
        return None, None
    rows, planned = _positions(came), _positions(within.shards[node])
    if torch.equal(rows, planned):
        return None, None
    by_position = torch.argsort(planned)
    index = by_position[torch.searchsorted(planned[by_position], rows)]
    inverse = torch.argsort(index)
    return _Order(index, _runs(index), device), _Order(inverse, _runs(inverse), device)


def _positions(shard: Sequence[Segment]) -> Tensor:
    return torch.cat([torch.arange(s.start, s.last + 1, s.step, device="cpu") for s in shard])


def _runs(index: Tensor) -> list[tuple[int, int]]:
    """[start, stop) of the runs of consecutive indices; empty if there are many."""
    breaks = (index.diff() != 1).nonzero().flatten() + 1
    if len(breaks) >= _RUNS:
        return []
    edges = [0, *breaks.tolist(), len(index)]
    return [(int(index[start]), int(index[stop - 1]) + 1) for start, stop in pairwise(edges)]


_SAVED = 5
"""Tensors that are kept of a group of heads: q, k, v, out, LSE."""
Saved = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


class HeadExecutor(Executor):
    """Runs passes whose ranks exchange tokens for heads before, and back after (Ulysses, USP)."""

    def forward(
        self, prepared: PreparedCall, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, *, keep: bool
    ) -> tuple[Tensor, Tensor | None, tuple[Tensor, ...]]:
        """See `Executor`. What is kept are five tensors for each group of heads, over all rows."""
        groups = prepared.plan.split_heads()
        reshard = Reshard(prepared, q.device, backward=False)
        coming = [reshard.to_heads([(q, g.q_heads), *((x, g.kv_heads) for x in (k, v) if g.brings_kv)]) for g in groups]
        out = q.new_empty((*q.shape[:3], v.shape[-1]))
        lse = q.new_empty((*q.shape[:3], 1), dtype=accumulation_dtype(q.dtype)) if prepared.with_lse else None
        saved: list[Saved] = []
        leaving: list[ToSequence] = []
        blocks = _with_shared(arriving.wait() for arriving in coming)
        for group, arriving, (queries, keys, values) in zip(groups, coming, blocks, strict=True):
            group_sinks = None if sinks is None else sinks[_own_heads(prepared, group)]
            group_out, group_lse = forward_rows(prepared, queries, keys, values, group_sinks)
            group_out = group_out.to(q.dtype)
            home: list[tuple[Tensor, Tensor, HeadRange]] = [(group_out, out, group.q_heads)]
            if lse is not None:
                home.append((group_lse.transpose(1, 2).unsqueeze(-1), lse, group.q_heads))
            leaving.append(reshard.to_sequence(home, alone=group is groups[-1]))
            arriving.wait_sent()
            if keep:
                saved.append((queries, keys, values, group_out, group_lse))
        if keep and not reshard.persistent:  # while the last results leave
            saved = _copied(saved, coming)
        for results in leaving:
            results.wait()
        lse = None if lse is None else lse.squeeze(-1).transpose(1, 2)
        return out, lse, tuple(x for group_saved in saved for x in group_saved)

    def backward(
        self, prepared: PreparedCall, saved: Sequence[Tensor], sinks: Tensor | None, dout: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """See `Executor`. dsinks is 0 for heads that other ranks compute."""
        p, groups = prepared.plan.call, prepared.plan.split_heads()
        if dout is None:
            rows = p.layout.count(prepared.transport.rank)
            dout = saved[0].new_zeros((p.batch, rows, p.heads, p.v_head_dim))
        dout = arrived(dout)
        reshard = Reshard(prepared, dout.device, backward=True)
        coming = [reshard.to_heads([(dout, group.q_heads)]) for group in groups]
        sizes = ((p.heads, p.head_dim), (p.kv_heads, p.head_dim), (p.kv_heads, p.v_head_dim))
        dq, dk, dv = (dout.new_empty((*dout.shape[:2], *size)) for size in sizes)
        dsinks = None if sinks is None else torch.zeros_like(sinks)
        leaving: list[ToSequence] = []
        dkv: tuple[Tensor, ...] = ()  # of K and V, which several groups may share
        kept = (saved[i : i + _SAVED] for i in range(0, len(saved), _SAVED))
        for group, arriving, (q, k, v, out, lse) in zip(groups, coming, kept, strict=True):
            (group_dout,) = arriving.wait()
            group_dq, *group_dkv = backward_rows(prepared, BackwardInputs(group_dout, q, k, v, lse, out))
            dkv = tuple(group_dkv) if group.brings_kv else _sum(dkv, group_dkv)
            home: list[tuple[Tensor, Tensor, HeadRange]] = [(group_dq, dq, group.q_heads)]
            if group.returns_kv:
                home += [(dkv[0], dk, group.kv_heads), (dkv[1], dv, group.kv_heads)]
            leaving.append(reshard.to_sequence(home, alone=group is groups[-1]))
            arriving.wait_sent()
            if sinks is not None and dsinks is not None:
                mine = _own_heads(prepared, group)
                dsinks[mine] = numerics.sinks_gradient(sinks[mine], lse, numerics.row_delta(group_dout, out))
        for results in leaving:
            results.wait()
        return dq, dk, dv, dsinks


def _sum(total: Sequence[Tensor], parts: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The elements of total + parts, in the accumulation dtype."""
    return tuple(a.to(accumulation_dtype(a.dtype)) + b for a, b in zip(total, parts, strict=True))


def _own_heads(prepared: PreparedCall, group: HeadGroup) -> slice:
    """Return the group's heads among all query heads."""
    plan = prepared.plan
    start = heads_of_rank(
        prepared.transport.rank % plan.head_parallel_size, plan.head_parallel_size, plan.call.heads
    ).start
    return slice(start + group.q_heads[0], start + group.q_heads[1])


def _copied(saved: Sequence[Saved], came: Sequence[ToHeads]) -> list[Saved]:
    """The same, with q, k and v in memory of their own; K and V that several groups share are copied once."""
    copies = _with_shared(group.kept() for group in came)
    return [(q, k, v, out, lse) for (q, k, v), (_, _, _, out, lse) in zip(copies, saved, strict=True)]


def _with_shared(received: Iterable[list[Tensor]]) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """(q, k, v) of each group, as they arrive. K and V that several groups share arrive with the first."""
    pair: list[Tensor] = []
    for queries, *own in received:
        pair = own or pair
        assert pair, "K and V come with the first group that reads them"
        keys, values = pair
        yield queries, keys, values
