"""Reorder rows between the order of ranks that divide heads and that of the plan: see `planning.rank_order`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import pairwise

import torch
from torch import Tensor

from burst_portable.layout import Layout, Segment

_RUNS = 64  # fewer runs of rows than this are reordered by `cat`, more by their indices
Reorder = Callable[[Tensor], Tensor]


def _reorder(index: Tensor, device: torch.device) -> Reorder:
    """Return a function that reorders rows: by `cat` if there are few runs, which is faster, else by indices."""
    if runs := _runs(index):
        return lambda x: torch.cat([x[start:stop] for start, stop in runs])
    rows = index.to(device)
    return lambda x: x.index_select(0, rows)


@lru_cache(maxsize=64)
def row_orders(
    layout: Layout, within: Layout, node: int, device: torch.device, spacing: int = 1
) -> tuple[Reorder | None, Reorder | None]:
    """Return the orders from the plan's rows to those of the ranks of a node, and back; (None, None) if they are equal.

    `layout`: Rows of each rank before the reshard. `within`: Rows of each node after it. `spacing`: see `HeadSplit`.
    """
    received = layout.joined(layout.ranks // within.ranks, spacing).shards[node]
    if within.shards[node] == received:
        return None, None
    rows, planned = _positions(received), _positions(within.shards[node])
    if torch.equal(rows, planned):
        return None, None
    by_position = torch.argsort(planned)
    index = by_position[torch.searchsorted(planned[by_position], rows)]
    return _reorder(index, device), _reorder(torch.argsort(index), device)


def _positions(shard: Sequence[Segment]) -> Tensor:
    return torch.cat([torch.arange(s.start, s.last + 1, s.step, device="cpu") for s in shard])


def _runs(index: Tensor) -> list[tuple[int, int]]:
    """Return [start, stop) of the runs of consecutive indices; an empty list if there are many."""
    breaks = (index.diff() != 1).nonzero().flatten() + 1
    if len(breaks) >= _RUNS:
        return []
    edges = [0, *breaks.tolist(), len(index)]
    return [(int(index[start]), int(index[stop - 1]) + 1) for start, stop in pairwise(edges)]
