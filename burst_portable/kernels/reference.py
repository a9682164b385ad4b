"""Define `ReferenceKernel`: attention over tiles in plain torch, for any dtype, device and head size.

It favors accuracy over speed. It computes in a wider dtype than its inputs (float32 for 16 bits, float64 for float32),
so that only the rounding of the results remains as an error. `conformance.oracle`, with which kernels are compared,
shares no code with it. Rows are computed in chunks, so that scores never have more than `SCORES` elements.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from burst_portable.kernels.base import BackwardInputs, Gradients, Kernel, Support, torch_dtype
from burst_portable.kernels.dropout import positions_of, weight_factors
from burst_portable.numerics import State, anchored, empty_state, merge_into, row_delta, running_dtype
from burst_portable.planning.call import AttentionCall, KernelTraits
from burst_portable.planning.tiles import Tile, Tiles

SCORES = 1 << 22


class ReferenceKernel(Kernel):
    """Compute attention in plain torch, one chunk of rows at a time."""

    name = "reference"
    traits = KernelTraits(supports_dropout=True)

    def supports(self, call: AttentionCall) -> Support:
        dtype = torch_dtype(call)
        if not dtype.is_floating_point or dtype.itemsize < 2:
            return Support(False, f"{call.dtype} is not a floating dtype of 16 bits or more")
        return Support(True)

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        tiles: Tiles,
        call: AttentionCall,
        *,
        state: State | None = None,
        yields_to_comm: bool = False,
    ) -> State:
        state = empty_state(q, v.shape[-1]) if state is None else state
        for chunk in _row_chunks(tiles, q):
            rows, columns = slice(chunk.q_start, chunk.q_stop), slice(chunk.k_start, chunk.k_stop)
            groups = k.shape[2]
            scores, _ = _scores(_grouped(q[:, rows], groups), _heads_first(k[:, columns], q.dtype), chunk, call)
            lse = torch.logsumexp(scores, -1)
            p = torch.exp(scores - anchored(lse).unsqueeze(-1))
            if call.dropout is not None:
                p = p * _factors(q, groups, tiles, chunk, call)
            out = _ungrouped(_matmul(p, _heads_first(v[:, columns], q.dtype)))
            merge_into((state[0][:, rows], state[1][:, :, rows]), out, lse.flatten(1, 2))
        return state

    def attend_backward(self, x: BackwardInputs, tiles: Tiles, call: AttentionCall, *, into: Gradients) -> None:
        dout, q, k, v, lse, out, delta = x
        if delta is None:
            assert out is not None, "exactly one of delta and out"
            delta = row_delta(dout, out)
        dq, dk, dv = into
        groups = k.shape[2]
        for chunk in _row_chunks(tiles, q):
            rows, columns = slice(chunk.q_start, chunk.q_stop), slice(chunk.k_start, chunk.k_stop)
            q_rows, dout_rows = _grouped(q[:, rows], groups), _grouped(dout[:, rows], groups)
            k_columns, v_columns = _heads_first(k[:, columns], q.dtype), _heads_first(v[:, columns], q.dtype)
            scores, slope = _scores(q_rows, k_columns, chunk, call)
            row_lse = lse[:, :, rows].unflatten(1, (groups, -1)).unsqueeze(-1)
            row_delta_ = delta[:, :, rows].unflatten(1, (groups, -1)).unsqueeze(-1)
            p = torch.exp(scores - anchored(row_lse))
            dp, dropped = _matmul(dout_rows, v_columns.transpose(-1, -2)), p
            if call.dropout is not None:
                factors = _factors(q, groups, tiles, chunk, call)
                dp, dropped = dp * factors, p * factors
            ds = p * (dp - row_delta_) * slope * call.scale
            dq[:, rows] += _ungrouped(_matmul(ds, k_columns))
            dk[:, columns] += _summed(ds, q_rows)
            dv[:, columns] += _summed(dropped, dout_rows)


# Below, G is the number of K/V heads and g that of query heads per K/V head: queries and scores are
# [B, G, g, rows, ...], keys [B, G, columns, D]. K and V are never repeated.


def _row_chunks(tiles: Tiles, q: Tensor) -> Iterator[Tile]:
    """Yield the tiles cut into chunks of rows whose scores fit into `SCORES` elements."""
    for tile in tiles:
        step = max(1, SCORES // (q.shape[0] * q.shape[2] * tile.columns))
        for start in range(tile.q_start, tile.q_stop, step):
            chunk = tile.clipped(start, min(start + step, tile.q_stop), tile.k_start, tile.k_stop)
            assert chunk is not None, "a tile has no empty rows"
            yield chunk


def _grouped(x: Tensor, groups: int) -> Tensor:
    """Return [B, S, Hq, D] as [B, G, g, S, D] in the dtype of the computation."""
    grouped: Tensor = x.to(running_dtype(x.dtype)).unflatten(2, (groups, -1))
    return grouped.permute(0, 2, 3, 1, 4)


def _heads_first(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return [B, S, G, D] as [B, G, S, D] in the dtype of the computation."""
    return x.to(running_dtype(dtype)).transpose(1, 2)


def _ungrouped(x: Tensor) -> Tensor:
    """Return [B, G, g, S, D] as [B, S, Hq, D]."""
    return x.permute(0, 3, 1, 2, 4).flatten(2, 3)


def _matmul(x: Tensor, y: Tensor) -> Tensor:
    """Multiply [B, G, g, S, A] by [B, G, A, C], giving [B, G, g, S, C], with one product per K/V head."""
    product: Tensor = (x.flatten(2, 3) @ y).unflatten(2, x.shape[2:4])
    return product


def _factors(q: Tensor, groups: int, tiles: Tiles, chunk: Tile, call: AttentionCall) -> Tensor:
    """Return the factors of dropout for the weights [B, G, g, rows, columns] of a chunk of a tile."""
    assert call.dropout is not None, "the caller has checked"
    rows, columns = positions_of(tiles, q.device)
    rows, columns = rows[chunk.q_start : chunk.q_stop], columns[chunk.k_start : chunk.k_stop]
    factors = weight_factors(call.dropout, rows, columns, q.shape[0], q.shape[2]).to(running_dtype(q.dtype))
    grouped: Tensor = factors.unflatten(1, (groups, -1))
    return grouped


def _summed(x: Tensor, y: Tensor) -> Tensor:
    """Return x^T y, summed over the query heads that share a K/V head: [B, columns, G, D]."""
    return (x.flatten(2, 3).transpose(-1, -2) @ y.flatten(2, 3)).transpose(1, 2)


def _scores(q: Tensor, k: Tensor, tile: Tile, call: AttentionCall) -> tuple[Tensor, Tensor | float]:
    """Return the scaled, capped, masked scores, and the derivative of the cap."""
    slope: Tensor | float = 1.0
    scores = _matmul(q, k.transpose(-1, -2)) * call.scale
    if call.softcap is not None:
        squashed = torch.tanh(scores / call.softcap)
        scores, slope = call.softcap * squashed, 1.0 - squashed.square()
    if not tile.full:
        rows = torch.arange(tile.q_start, tile.q_stop, device=q.device)
        columns = torch.arange(tile.k_start, tile.k_stop, device=q.device)
        distance = rows.unsqueeze(1) - columns
        scores = scores.masked_fill((distance < tile.lo) | (distance > tile.hi), -torch.inf)
    return scores, slope
