"""From sequence shards to head shards and back: the all-to-all around Ulysses.

::

    rank:      0      1                     0      1
    rows  A   AaAb                  heads  Aa Ba   Ab Bb        (letters: rows; small ones: heads)
          B          BaBb
"""

from __future__ import annotations

import math

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


def to_heads(x: Tensor, layout: Layout, transport: Transport) -> Tensor:
    """``[B, S_rank, H, D]`` -> ``[B, S_all, H / ranks, D]``, rows in their natural order."""
    ranks, rank, heads = transport.size, transport.rank, x.shape[2]
    mine = heads_of(rank, ranks, heads)
    sends = [x[:, :, heads_of(r, ranks, heads)].contiguous() for r in range(ranks)]
    width = mine.stop - mine.start
    shapes = [(x.shape[0], layout.count(r), width, x.shape[3]) for r in range(ranks)]
    receives = [_inbox(sends[rank], transport, r, shape) for r, shape in enumerate(shapes)]
    transport.all_to_all([_bytes(s) for s in sends], [_bytes(r) for r in receives], "to heads")
    out = x.new_empty(x.shape[0], layout.length, width, x.shape[3])
    for r, part in enumerate(receives):
        _scatter_rows(out, part, layout, r)
    return out


def to_sequence(x: Tensor, layout: Layout, transport: Transport, heads: int) -> Tensor:
    """``[B, S_all, H / ranks, D]`` -> ``[B, S_rank, H, D]``; what ranks hold of a shared head is added up."""
    ranks, rank = transport.size, transport.rank
    sends = [_gather_rows(x, layout, r) for r in range(ranks)]
    shape = x.shape[0], layout.count(rank), x.shape[2], x.shape[3]
    receives = [_inbox(sends[rank], transport, r, shape) for r in range(ranks)]
    transport.all_to_all([_bytes(s) for s in sends], [_bytes(r) for r in receives], "to sequence")
    shared = heads < ranks
    out = (x.new_zeros if shared else x.new_empty)(x.shape[0], layout.count(rank), heads, x.shape[3])
    for r, part in enumerate(receives):
        if shared:
            out[:, :, heads_of(r, ranks, heads)] += part
        else:
            out[:, :, heads_of(r, ranks, heads)] = part
    return out


def _inbox(mine: Tensor, transport: Transport, peer: int, shape: tuple[int, ...]) -> Tensor:
    """Where a peer's part will come; this rank's own part is there already."""
    if peer == transport.rank:
        return mine
    size = math.prod(shape) * mine.itemsize
    return transport.inbox(size, mine.device, peer)[:size].view(mine.dtype).view(shape)


def _gather_rows(x: Tensor, layout: Layout, rank: int) -> Tensor:
    """The rows of a shard, from all rows in their natural order."""
    parts = [x[:, s.start : s.last + 1 : s.step] for s in layout.shards[rank]]
    return torch.cat(parts, dim=1).contiguous()


def _scatter_rows(out: Tensor, part: Tensor, layout: Layout, rank: int) -> None:
    """The other way: the rows of a shard to their natural places."""
    row = 0
    for s in layout.shards[rank]:
        out[:, s.start : s.last + 1 : s.step] = part[:, row : row + s.count]
        row += s.count


def _bytes(x: Tensor) -> Tensor:
    return x.view(-1).view(torch.uint8)
