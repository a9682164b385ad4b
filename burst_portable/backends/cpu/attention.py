"""torch's own CPU flash attention, put to work on tiles.

It knows boxes, top-left causal boxes, and masks as floating tensors. So a tile becomes::

    full               ■       one box
    causal             ■◣      a box of the columns that every row sees, and an aligned causal box
    anything else              strips of rows, each a box, with a small mask where the band cuts it

Tiles have no empty rows, so its convention for them (LSE 0) never comes up. 16-bit inputs are computed in float32:
the operator is several times slower in 16 bits.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from burst_portable.kernels.contract import Gradients, Options, Problem, Support
from burst_portable.numerics import (
    State,
    accumulation_dtype,
    empty_state,
    merge_into,
    row_delta,
    surrogate_out,
    widened,
)
from burst_portable.tiles import Tile, Tiles

STRIP = 256
"""Rows of a strip: its mask holds STRIP x (STRIP + window) numbers."""


class Piece(NamedTuple):
    """One call of the operator: a box, and how it is masked."""

    rows: slice
    columns: slice
    causal: bool = False
    cut_by: Tile | None = None

    def mask(self, dtype: torch.dtype) -> Tensor | None:
        """0 where a pair is seen and -inf elsewhere; None if nothing is cut."""
        if self.cut_by is None:
            return None
        tile = self.cut_by
        distance = torch.arange(tile.q_start, tile.q_stop).unsqueeze(1) - torch.arange(tile.k_start, tile.k_stop)
        hidden = (distance < tile.lo) | (distance > tile.hi)
        return torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, -torch.inf)


def lower(tile: Tile) -> Iterator[Piece]:
    """The calls that a tile takes."""
    rows = slice(tile.q_start, tile.q_stop)
    if tile.full:
        yield Piece(rows, slice(tile.k_start, tile.k_stop))
    elif tile.hi >= tile.q_stop - 1 - tile.k_start:
        diagonal = tile.q_start - tile.lo  # the last column that the first row sees
        if diagonal > tile.k_start:
            yield Piece(rows, slice(tile.k_start, diagonal))
        yield Piece(rows, slice(diagonal, tile.k_stop), causal=True)
    else:
        for start in range(tile.q_start, tile.q_stop, STRIP):
            strip = tile.clipped(start, min(start + STRIP, tile.q_stop), tile.k_start, tile.k_stop)
            assert strip is not None, "a tile has no empty rows"
            box = slice(strip.q_start, strip.q_stop), slice(strip.k_start, strip.k_stop)
            yield Piece(*box, cut_by=None if strip.full else strip)


class CpuFlashKernel:
    """See `kernels.contract.Kernel`."""

    name = "cpu_flash"

    def supports(self, problem: Problem) -> Support:
        if problem.device != "cpu":
            return Support(False, f"it takes CPU tensors, not {problem.device}")
        if not problem.dtype.is_floating_point or problem.dtype.itemsize < 2:
            return Support(False, f"it does not take {problem.dtype}")
        if problem.value_dim != problem.head_dim:
            return Support(False, f"values of size {problem.value_dim} differ from heads of size {problem.head_dim}")
        if problem.softcap:
            return Support(False, "it has no softcap")
        return Support(True)

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, tiles: Tiles, options: Options, *, state: State | None = None
    ) -> State:
        operator = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        everything = slice(0, q.shape[1])
        qh, kh, vh = _heads_first(q), _heads_first(k), _heads_first(v)
        for piece in (piece for tile in tiles for piece in lower(tile)):
            out, lse = operator(
                qh[:, :, piece.rows],
                kh[:, :, piece.columns],
                vh[:, :, piece.columns],
                0.0,
                piece.causal,
                attn_mask=piece.mask(qh.dtype),
                scale=options.scale,
            )
            out = out.transpose(1, 2)
            if state is None and piece.rows == everything:
                state = (out, lse.contiguous())  # perhaps the only piece: kept as it is
                continue
            state = empty_state(q, v.shape[-1]) if state is None else widened(state, q.dtype)
            merge_into((state[0][:, piece.rows], state[1][:, :, piece.rows]), out, lse)
        return empty_state(q, v.shape[-1]) if state is None else state

    def attend_backward(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        lse: Tensor,
        tiles: Tiles,
        options: Options,
        *,
        delta: Tensor | None = None,
        out: Tensor | None = None,
        into: Gradients,
    ) -> None:
        assert (delta is None) != (out is None), "exactly one of delta and out"
        operator = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        wide = dout.to(accumulation_dtype(dout.dtype))
        if delta is None:
            assert out is not None
            delta = row_delta(dout, out)
        # The operator computes delta from `out`; any out with the right row sums will do.
        stand_in = _heads_first(surrogate_out(wide, delta))
        douth, qh, kh, vh = _heads_first(wide), _heads_first(q), _heads_first(k), _heads_first(v)
        dq, dk, dv = into
        for piece in (piece for tile in tiles for piece in lower(tile)):
            rows, columns = piece.rows, piece.columns
            parts = operator(
                douth[:, :, rows],
                qh[:, :, rows],
                kh[:, :, columns],
                vh[:, :, columns],
                stand_in[:, :, rows],
                _as_the_operator_makes_it(lse[:, :, rows]),
                0.0,
                piece.causal,
                attn_mask=piece.mask(qh.dtype),
                scale=options.scale,
            )
            for total, part, where in zip((dq, dk, dv), parts, (rows, columns, columns), strict=True):
                total[:, where] += part.transpose(1, 2)


def _heads_first(x: Tensor) -> Tensor:
    return x.to(accumulation_dtype(x.dtype)).transpose(1, 2)


def _as_the_operator_makes_it(lse: Tensor) -> Tensor:
    """``[B, H, S]`` with heads innermost in memory."""
    return lse.transpose(1, 2).contiguous().transpose(1, 2)
