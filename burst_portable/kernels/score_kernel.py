"""Compute and use whole rows of scores in plain torch, for the strategy `ring_self_attention`.

Scores and weights are ``[B, Hq, rows, columns]`` in the accumulation dtype. One product is made per K/V head, which its
query heads share: K and V are not repeated.
"""

from __future__ import annotations

import torch
from torch import Tensor

from burst_portable.kernels.dropout import positions_of, weight_factors
from burst_portable.kernels.reference import ReferenceKernel
from burst_portable.numerics import accumulation_dtype
from burst_portable.planning.call import AttentionCall
from burst_portable.planning.tiles import Tiles


class ScoreRowKernel(ReferenceKernel):
    """Compute the parts of attention that rows of scores need: products with one block of K or V."""

    name = "score_rows"

    def scores(self, q: Tensor, k: Tensor, tiles: Tiles, call: AttentionCall) -> Tensor:
        """Return the scaled, capped scores of q and a block of keys; -inf for pairs that no tile contains."""
        scores = self.product(_heads(q), k) * call.scale
        if call.softcap is not None:
            scores = call.softcap * torch.tanh(scores / call.softcap)
        return scores.masked_fill(~_visible(tiles, q.shape[1], k.shape[1], q.device), -torch.inf)

    def dropped(self, weights: Tensor, tiles: Tiles, call: AttentionCall) -> Tensor:
        """Return weights, or their gradients, times the factors of dropout."""
        if call.dropout is None:
            return weights
        rows, columns = positions_of(tiles, weights.device)
        batch, heads, *_ = weights.shape
        return weights * weight_factors(call.dropout, rows, columns, batch, heads).to(weights.dtype)

    def product(self, x: Tensor, y: Tensor) -> Tensor:
        """Return x yᵀ of x ``[B, Hq, rows, D]`` and a block y ``[B, columns, Hkv, D]``: ``[B, Hq, rows, columns]``."""
        return self.weighted(x, y, transposed=True)

    def weighted(self, weights: Tensor, y: Tensor, *, transposed: bool = False) -> Tensor:
        """Return the products of weights ``[B, Hq, rows, columns]`` and a block ``[B, columns, Hkv, D]``."""
        block = _heads(y)
        grouped = weights.unflatten(1, (block.shape[1], -1)).flatten(2, 3)  # [B, Hkv, g * rows, ...]
        made = grouped @ (block.transpose(-1, -2) if transposed else block)
        parts: Tensor = made.unflatten(2, (-1, weights.shape[2]))
        return parts.flatten(1, 2)

    def summed(self, weights: Tensor, x: Tensor, kv_heads: int) -> Tensor:
        """Return weightsᵀ x of ``[B, Hq, rows, columns]`` and ``[B, Hq, rows, D]``: ``[B, columns, Hkv, D]``.

        It is summed over the query heads that share a K/V head.
        """
        a, b = (y.unflatten(1, (kv_heads, -1)).flatten(2, 3) for y in (weights, x))
        sums: Tensor = a.transpose(-1, -2) @ b
        return sums.transpose(1, 2)


def visible_part(tiles: Tiles) -> tuple[slice, slice]:
    """Return the rows and the columns of a block around all tiles. All other weights are 0."""
    q_start, q_stop, k_start, k_stop = tiles.box
    return slice(q_start, q_stop), slice(k_start, k_stop)


def without_hidden(x: Tensor, tiles: Tiles, dim: int, *, is_columns: bool) -> Tensor:
    """Return the rows or columns of `visible_part`, with zeros for those in no tile, such as padding.

    Products of their weights, which are 0, with an infinity or NaN would be NaN.

    Args:
        x: Tensor with the rows or columns of a block in dimension `dim`.
        tiles: Tiles of the block.
        dim: That dimension.
        is_columns: Whether it has the columns.
    """
    ranges = tiles.ranges(is_columns=is_columns, least_gap=1)
    first, past = ranges[0][0], ranges[-1][1]
    part = x.narrow(dim, first, past - first)
    if len(ranges) == 1:
        return part
    found = torch.zeros_like(part)
    for start, stop in ranges:
        found.narrow(dim, start - first, stop - start).copy_(x.narrow(dim, start, stop - start))
    return found


def _heads(x: Tensor) -> Tensor:
    """Return ``[B, S, H, D]`` as ``[B, H, S, D]`` in the accumulation dtype."""
    return x.to(accumulation_dtype(x.dtype)).transpose(1, 2)


def _visible(tiles: Tiles, rows: int, columns: int, device: torch.device) -> Tensor:
    """Return which pairs of a block the tiles have, as ``[rows, columns]``."""
    visible = torch.zeros(rows, columns, dtype=torch.bool, device=device)
    for tile in tiles:
        distance = torch.arange(tile.q_start, tile.q_stop, device=device).unsqueeze(1) - torch.arange(
            tile.k_start, tile.k_stop, device=device
        )
        visible[tile.q_start : tile.q_stop, tile.k_start : tile.k_stop] |= (distance >= tile.lo) & (distance <= tile.hi)
    return visible
