"""From sequence shards to head shards and back: the all-to-all around Ulysses.

::

    rank:      0      1                     0      1
    rows  A   AaAb                  heads  Aa Ba   Ab Bb        (letters: rows; small ones: heads)
          B          BaBb

Messages are packed in one copy a tensor, and put in order in another: what came may be used until the pass ends, and
these tensors are kept for backward.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from burst_portable.comm.base import Transport
from burst_portable.layout import Layout


def heads_of(rank: int, ranks: int, heads: int) -> slice:
    """The heads that a rank holds; ranks share a head where there are fewer heads than ranks."""
    if heads >= ranks:
        return slice(rank * heads // ranks, (rank + 1) * heads // ranks)
    shared = rank * heads // ranks
    return slice(shared, shared + 1)


def to_heads(tensors: Sequence[Tensor], layout: Layout, transport: Transport) -> list[Tensor]:
    """``[B, S_rank, H, D]`` -> ``[B, S_all, H / ranks, D]`` each, rows in their natural order."""
    packed = [_by_rank(x, transport.size) for x in tensors]  # all before the first is sent: sending does not wait then
    rows = [layout.count(rank) for rank in range(transport.size)]
    return [_natural(_exchanged(list(parts), rows, transport, "to heads"), layout) for parts in packed]


def to_sequence(x: Tensor, layout: Layout, transport: Transport, heads: int) -> Tensor:
    """``[B, S_all, H / ranks, D]`` -> ``[B, S_rank, H, D]``; what ranks hold of a shared head is added up."""
    ranks, rank = transport.size, transport.rank
    order, _ = _orders(layout, x.device)
    x = x if order is None else x.index_select(1, order)
    rows = [layout.count(r) for r in range(ranks)]
    sends = [part.contiguous() for part in torch.split(x, rows, dim=1)]
    came = _exchanged(sends, [rows[rank]] * ranks, transport, "to sequence", even=len(set(rows)) == 1)
    stacked = came if isinstance(came, Tensor) else torch.stack(came)  # [ranks, B, S, h, D]
    if heads < ranks:
        stacked = stacked.reshape(heads, ranks // heads, *stacked.shape[1:]).sum(1)
    in_rows = stacked.permute(1, 2, 0, 3, 4)
    return in_rows.clone(memory_format=torch.contiguous_format).flatten(2, 3)


def _by_rank(x: Tensor, ranks: int) -> Tensor:
    """``[B, S, H, D]`` -> ``[ranks, B, S, h, D]``: what goes to each rank, one after the other."""
    heads = x.shape[2]
    if heads < ranks:
        x = x.repeat_interleave(ranks // heads, 2)
    apart = x.reshape(*x.shape[:2], ranks, x.shape[2] // ranks, x.shape[3])
    return apart.permute(2, 0, 1, 3, 4).contiguous()


def _exchanged(
    sends: list[Tensor], rows: list[int], transport: Transport, label: str, *, even: bool | None = None
) -> Tensor | list[Tensor]:
    """What every rank sent: ``[ranks, B, S, h, D]`` where all messages are as large as each other, else a list."""
    rank, mine = transport.rank, sends[transport.rank]
    shapes = [(mine.shape[0], count, *mine.shape[2:]) for count in rows]
    came: Tensor | list[Tensor]
    if len(set(rows)) == 1 if even is None else even:
        size = math.prod(shapes[0]) * mine.itemsize
        came = transport.inboxes(size, mine.device).view(mine.dtype).view(transport.size, *shapes[0])
        came[rank].copy_(mine)
    else:
        came = [mine if r == rank else _inbox(mine, transport, r, shape) for r, shape in enumerate(shapes)]
    transport.all_to_all(
        [_bytes(s) for s in (*sends[:rank], came[rank], *sends[rank + 1 :])], [_bytes(r) for r in came], label
    )
    return came


def _inbox(mine: Tensor, transport: Transport, peer: int, shape: tuple[int, ...]) -> Tensor:
    """Where a peer's part will come."""
    return transport.inbox(math.prod(shape) * mine.itemsize, mine.device, peer).view(mine.dtype).view(shape)


def _natural(parts: Tensor | list[Tensor], layout: Layout) -> Tensor:
    """Parts of all ranks as ``[B, S_all, h, D]``, rows in their natural order."""
    _, inverse = _orders(layout, parts[0].device)
    if inverse is None or not isinstance(parts, Tensor) or parts.shape[1] > 1:
        whole = torch.cat(list(parts), dim=1)
        return whole if inverse is None else whole.index_select(1, inverse)
    return parts.view(1, -1, *parts.shape[3:]).index_select(1, inverse)


@lru_cache(maxsize=64)
def _orders(layout: Layout, device: torch.device) -> tuple[Tensor | None, Tensor | None]:
    """(rows in the order of ranks, and its inverse), or two None where that is their natural order."""
    order = torch.cat([torch.arange(s.start, s.last + 1, s.step) for shard in layout.shards for s in shard])
    if torch.equal(order, torch.arange(layout.length)):
        return None, None
    return order.to(device), torch.argsort(order).to(device)


def _bytes(x: Tensor) -> Tensor:
    return x.reshape(-1).view(torch.uint8)
