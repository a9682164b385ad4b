"""Divide the bytes of an exchange between head and sequence shards into parts: which go to or come from which rank."""

from __future__ import annotations

from functools import lru_cache
from itertools import accumulate

from torch import Tensor

from burst_portable.comm.base import Part, Strip
from burst_portable.planning.head_division import HeadRange
from burst_portable.planning.memory_traffic import STRIDED_BATCHES

_LARGEST_STRIDE = (1 << 31) - 1  # bytes from one line to the next: limit of copy engines
SendAndReceiveParts = tuple[tuple[Part, ...], tuple[Part, ...]]
"""(parts to send, parts to receive)."""


@lru_cache(maxsize=512)
def parts_to_heads(
    order: tuple[int, ...], peers: range, rows: tuple[int, ...], row: int, offset: int
) -> SendAndReceiveParts:
    """Return the parts of the last rank of `order`: its packed rows for each rank; all rows of its heads by rank.

    `order`: Indices of the ranks, as they are sent to. `peers`: The rank of each index. `rows`: Rows of each rank, of
    `row` bytes each. `offset`: That of the exchange in every inbox.
    """
    index, starts = order[-1], tuple(accumulate(rows, initial=0))
    size, target = rows[index] * row, offset + starts[index] * row
    sends = tuple(Part(peers[i], i * size, (i + 1) * size, target) for i in order)
    receives = tuple(Part(peers[i], starts[i] * row, starts[i + 1] * row, offset + starts[i] * row) for i in order)
    return sends, receives


def can_send_strided(x: Tensor) -> bool:
    """Return whether a copy engine can send a tensor.

    The heads of a row must be contiguous, rows must not overlap (as in an expanded tensor), their stride must be within
    the limit, and the batch must be small.
    """
    batch, rows, heads, dim = x.shape
    lines = x.stride(3) == 1 and (x.stride(2) == dim or heads == 1)
    return (
        lines
        and batch <= STRIDED_BATCHES
        and (rows == 1 or heads * dim <= x.stride(1) <= _LARGEST_STRIDE // x.itemsize)
    )


@lru_cache(maxsize=512)
def strips_to_heads(
    order: tuple[int, ...],
    peers: range,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    itemsize: int,
    heads: HeadRange,
    offset: int,
    row: int,
) -> tuple[Strip, ...]:
    """Return the strips of a tensor of shape [B, S_rank, H, D] whose heads are divided among the ranks in `order`.

    `heads`: Range of heads to send, among the heads of each rank. `offset`: That of their first row in the receivers'
    inboxes, where a row has `row` bytes. `order` and `peers`: see `parts_to_heads`.
    """
    batch, rows, count, dim = shape
    owners = min(len(order), count)
    width, strips = (heads[1] - heads[0]) * dim * itemsize, []
    step = strides[1] * itemsize if rows > 1 else width  # the stride of a single row may have any value
    for i in order:
        head = i * owners // len(order) * (count // owners) + heads[0]
        for b in range(batch):
            start = (b * strides[0] + head * strides[2]) * itemsize
            strips.append(Strip(peers[i], start, offset + b * width, rows, width, step, row))
    return tuple(strips)


@lru_cache(maxsize=512)
def parts_to_sequence(
    order: tuple[int, ...], peers: range, rows: tuple[int, ...], row: int, offset: int
) -> SendAndReceiveParts:
    """Return the parts on the way back: to each rank its rows; from each rank its results for the local rows."""
    index, starts = order[-1], tuple(accumulate(rows, initial=0))
    size = rows[index] * row
    sends = tuple(Part(peers[i], starts[i] * row, starts[i + 1] * row, offset + index * rows[i] * row) for i in order)
    return sends, tuple(Part(peers[i], i * size, (i + 1) * size, offset + i * size) for i in order)
