"""Exchange sequence shards for head shards and back: the all-to-alls of Ulysses, among all ranks or those of a node.

::

    rank:      0      1                     0      1
    rows  A   AaAb                  heads  Aa Ba   Ab Bb        (capital letters: rows; small letters: heads)
          B          BaBb

To heads, a rank gets one message per group from every other rank, packed in one copy per tensor, or sent without
packing (`Transport.supports_strided_sends`). Received rows are in the order of ranks, and are used in place if the plan
has rank order (see `planning.rank_order`). Back, there is one message per tensor, without a copy in that case.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from burst_portable import numerics
from burst_portable.comm.base import Exchange, Parts, Strips
from burst_portable.numerics import accumulation_dtype
from burst_portable.planning.head_division import HeadRange
from burst_portable.planning.messages import Field, head_room
from burst_portable.runtime.exchange_parts import can_send_strided, parts_to_heads, parts_to_sequence, strips_to_heads
from burst_portable.runtime.prepared_call import PreparedCall
from burst_portable.runtime.row_orders import row_orders


class Reshard:
    """The all-to-alls of one pass on one rank. All ranks start the same ones, in the same order.

    Each is among the `Plan.head_parallel_size` ranks that divide the heads, `peers`. They have the indices 0, 1, 2 ...
    Offsets are in bytes of an inbox.
    """

    def __init__(self, prepared: PreparedCall, device: torch.device, *, backward: bool) -> None:
        self.plan, self.transport, self.device = prepared.plan, prepared.transport, device
        self._observer, self._backward = prepared.observer, backward
        plan = self.plan
        assert plan.heads is not None, "heads are divided"
        rank, layout, self.size = self.transport.rank, plan.call.layout, plan.head_parallel_size
        self.index, self.peers = plan.heads.index(rank), plan.heads.peers(rank)
        self.rows = tuple(map(layout.count, self.peers))
        self.starts = tuple(accumulate(self.rows, initial=0))  # first row of each rank, and the number of all rows
        self._order = tuple((self.index + distance) % self.size for distance in range(1, self.size + 1))
        self.to_ranks, self.to_plan = row_orders(
            layout, plan.forward.call.layout, plan.forward.member(rank), device, plan.head_spacing
        )
        self._offset = 0  # of the next exchange, in every rank's inbox
        self._has_started = False

    @property
    def persistent(self) -> bool:
        """Return whether received tensors stay unchanged after the pass."""
        return self.to_plan is not None or self.transport.keeps_received

    def copying(self) -> AbstractContextManager[object]:
        """Return a context around packing and unpacking, for the profiler."""
        return self._observer.copies(self.device, 0, backward=self._backward)

    def to_heads(self, parts: Sequence[tuple[Tensor, HeadRange]]) -> ToHeads:
        """Start an exchange after which this rank has all rows of some heads.

        Args:
            parts: Tensors of shape [B, S_rank, H, D] and of one dtype, each with the range of heads of every rank.
        """
        like = parts[0][0]
        fields = [Field(past - first, x.shape[3], x.itemsize) for x, (first, past) in parts]
        row = sum(field.size(like.shape[0]) for field in fields)
        buffer, offset = self._receive_buffer(self.starts[-1] * row, row, back=False)
        received = buffer.view(like.dtype).view(self.starts[-1], -1)
        send_parts, receive_parts = parts_to_heads(self._order, self.peers, self.rows, row, offset)
        sends: list[Parts | Strips] = []
        if self.transport.supports_strided_sends and all(can_send_strided(x) for x, _ in parts):
            offset += self.starts[self.index] * row  # this rank's rows follow those of the ranks before it
            for (x, heads), field in zip(parts, fields, strict=True):
                strips = strips_to_heads(self._order, self.peers, x.shape, x.stride(), x.itemsize, heads, offset, row)
                sends.append(Strips(x, strips))
                offset += field.size(like.shape[0])
        else:
            sends.append(Parts(self._packed(parts, fields, row), send_parts))
        exclusive, self._has_started = not self._has_started, True
        exchange = self.transport.exchange(sends, [Parts(buffer, receive_parts)], "to heads", exclusive=exclusive)
        with self.copying():
            exchange.copy_local()
        return ToHeads(self, exchange, received, fields, like.shape[0], sends)

    def _packed(self, parts: Sequence[tuple[Tensor, HeadRange]], fields: Sequence[Field], row: int) -> Tensor:
        """Return the packed heads of each rank, of shape [ranks, S_rank, row]. `row`: bytes of a row."""
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

    def to_sequence(self, parts: Sequence[tuple[Tensor, Tensor, HeadRange]], *, exclusive: bool) -> ToSequence:
        """Start an exchange that sends results back to the ranks of their rows.

        Args:
            parts: (tensor, result, heads) of each tensor of shape [B, S_all, h, D]. It is written into the result, of
                shape [B, S_rank, H, D], at the range `heads` of this rank's heads. Contributions of several ranks are
                summed.
            exclusive: Whether no kernel computes after it.
        """
        size, local_rows = self.size, self.rows[self.index]
        sends, receives, received = [], [], []
        for x, result, heads in parts:
            is_shared = result.shape[2] < size  # several ranks contribute: sent in the accumulation dtype and summed
            with self.copying():
                rows = self._rows_first(x, accumulation_dtype(x.dtype) if is_shared else result.dtype)
            row = rows[0].numel() * rows.itemsize
            buffer, offset = self._receive_buffer(size * local_rows * row, row, back=True)
            send_parts, receive_parts = parts_to_sequence(self._order, self.peers, self.rows, row, offset)
            sends.append(Parts(rows, send_parts))
            receives.append(Parts(buffer, receive_parts))
            received.append((buffer.view(rows.dtype).view(size, local_rows, *rows.shape[1:]), result, heads))
        exchange = self.transport.exchange(sends, receives, "to sequence", exclusive=exclusive)
        return ToSequence(self, exchange, received, sends)

    def _receive_buffer(self, size: int, row: int, *, back: bool) -> tuple[Tensor, int]:
        """Return a receive buffer of `size` bytes, and its offset, which is the same on every rank."""
        offset = self._offset
        self._offset += head_room(self.plan, row, back=back)
        return self.transport.receive_buffer(size, self.device, self.transport.rank, offset), offset

    def _rows_first(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """Convert [B, S_all, h, D] to contiguous [S_all, B, h, D], with rows in the order of ranks."""
        rows = x.transpose(0, 1).to(dtype, memory_format=torch.contiguous_format)
        return rows.contiguous() if self.to_ranks is None else self.to_ranks(rows)


@dataclass(eq=False, slots=True)
class ToHeads:
    """An exchange that brings all rows of some heads to this rank."""

    _reshard: Reshard
    _exchange: Exchange
    _received: Tensor
    _fields: Sequence[Field]
    _batch: int
    _sends: list[Parts | Strips]

    def wait(self) -> list[Tensor]:
        """Wait for the tensors of shape [B, S_all, h, D], rows in the order of the plan, maybe in a receive buffer."""
        self._exchange.wait()
        rows = self._received
        if self._reshard.to_plan is not None:
            with self._reshard.copying():
                rows = self._reshard.to_plan(rows)
        return _tensors(rows, self._fields, self._batch)

    def copies(self) -> list[Tensor]:
        """Return copies of the received tensors, which stay after the pass."""
        with self._reshard.copying():
            return _tensors(self._received.clone(), self._fields, self._batch)

    def wait_sent(self) -> None:
        """Wait until all sends are complete, and release their buffers."""
        self._exchange.wait_sent()
        self._sends.clear()


@dataclass(eq=False, slots=True)
class ToSequence:
    """An exchange that sends results back to the ranks of their rows."""

    _reshard: Reshard
    _exchange: Exchange
    _received: list[tuple[Tensor, Tensor, HeadRange]]
    _sends: list[Parts]

    def wait(self) -> None:
        """Wait for all parts and write them into the results. The local part is copied during the transfers."""
        with self._reshard.copying():
            self._exchange.copy_local()
        self._exchange.wait()
        with self._reshard.copying():
            for pieces, result, heads in self._received:
                owners = min(len(pieces), result.shape[2])
                if owners < len(pieces):  # [ranks, S, B, h, D] -> [heads, S, B, 1, D]
                    pieces = pieces.view(owners, -1, *pieces.shape[1:]).sum(1)
                numerics.copy(pieces, _of_owners(result, owners, heads))
        self._exchange.wait_sent()
        self._received.clear()
        self._sends.clear()


def _fields(rows: Tensor, fields: Sequence[Field], batch: int) -> list[Tensor]:
    """Return a view of shape [ranks, S, B, h, D] of each field of contiguous rows [ranks, S, row]."""
    ranks, count, row = rows.shape
    return [
        rows.as_strided((ranks, count, batch, heads, dim), (count * row, row, heads * dim, dim, 1), offset)
        for heads, dim, offset in _field_offsets(rows, fields, batch)
    ]


def _tensors(rows: Tensor, fields: Sequence[Field], batch: int) -> list[Tensor]:
    """Return a view of shape [B, S, h, D] of each field of contiguous rows [S, row]."""
    count, row = rows.shape
    return [
        rows.as_strided((batch, count, heads, dim), (heads * dim, row, dim, 1), offset)
        for heads, dim, offset in _field_offsets(rows, fields, batch)
    ]


def _field_offsets(rows: Tensor, fields: Sequence[Field], batch: int) -> Iterator[tuple[int, int, int]]:
    """Yield (heads, head size, storage offset in elements) of each field."""
    offset = int(rows.storage_offset())
    for field in fields:
        yield field.heads, field.dim or 1, offset
        offset += field.size(batch) // rows.itemsize


def _of_owners(x: Tensor, owners: int, heads: HeadRange) -> Tensor:
    """Return a view of shape [owners, S, B, h, D] of [B, S, H, D]: the range `heads` of each owner's heads."""
    batch, rows, count, dim = x.shape
    step_batch, step_row, step_head, step = x.stride()
    return x.as_strided(
        (owners, rows, batch, heads[1] - heads[0], dim),
        (count // owners * step_head, step_row, step_batch, step_head, step),
        x.storage_offset() + heads[0] * step_head,
    )
