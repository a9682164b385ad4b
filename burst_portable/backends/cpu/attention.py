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

from burst_portable.kernels.base import Gradients, KernelProblem, Support
from burst_portable.kernels.operator_kernel import PiecewiseKernel
from burst_portable.numerics import State, accumulation_dtype
from burst_portable.planning.tiles import Tile

STRIP = 256
"""Rows of a strip: its mask holds STRIP x (STRIP + window) numbers."""

_LANES = 16
"""Numbers in the widest vector of a CPU: for fewer columns the operator looks for the largest score in another way."""


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
        ends = (tile.q_start, tile.q_stop), (tile.k_start, tile.k_stop)
        rows, columns = (torch.arange(*each, device="cpu") for each in ends)  # the operator reads whatever it is given
        distance = rows.unsqueeze(1) - columns
        hidden = (distance < tile.lo) | (distance > tile.hi)
        return hidden.new_zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, -torch.inf)


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


class CpuFlashKernel(PiecewiseKernel[Piece]):
    """See `kernels.base.Kernel`."""

    name = "cpu_flash"

    def supports(self, problem: KernelProblem) -> Support:
        if problem.device != "cpu":
            return Support(False, f"it takes CPU tensors, not {problem.device}")
        if not problem.dtype.is_floating_point or problem.dtype.itemsize < 2:
            return Support(False, f"it does not take {problem.dtype}")
        if problem.value_dim != problem.head_dim:
            return Support(False, f"values of size {problem.value_dim} differ from heads of size {problem.head_dim}")
        if problem.softcap:
            return Support(False, "it has no softcap")
        if not problem.positive_scale:
            return Support(False, "it masks with -inf before it scales, so the scale must be positive")
        return Support(True)

    def lower(self, tile: Tile) -> Iterator[Piece]:
        return lower(tile)

    def ready(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        return x.to(accumulation_dtype(dtype))

    def forward(self, q: Tensor, k: Tensor, v: Tensor, piece: Piece, scale: float) -> State:
        operator = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        heads_first = (x.transpose(1, 2) for x in (q, k, v))
        out, lse = operator(*heads_first, 0.0, piece.causal, attn_mask=piece.mask(q.dtype), scale=scale)
        if k.shape[1] < _LANES:
            _show_nan(out, lse, q, k)
        return out.transpose(1, 2), lse

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, piece: Piece, scale: float
    ) -> Gradients:
        operator = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        heads_first = (x.transpose(1, 2) for x in (dout, q, k, v, out))
        mask = piece.mask(q.dtype)
        parts = operator(*heads_first, _as_it_makes_it(lse), 0.0, piece.causal, attn_mask=mask, scale=scale)
        dq, dk, dv = (x.transpose(1, 2) for x in parts)
        return dq, dk, dv


def _show_nan(out: Tensor, lse: Tensor, q: Tensor, k: Tensor) -> None:
    """Mend rows of NaN scores alone, which the operator takes for empty ones where columns are few: out 0, LSE 0."""
    scores = torch.einsum("bshgd,bchd->bhgsc", q.unflatten(2, (k.shape[2], -1)), k).flatten(1, 2)
    lost = (lse == 0) & scores.isnan().any(-1)
    lse.masked_fill_(lost, torch.nan)
    out.masked_fill_(lost.unsqueeze(-1), torch.nan)


def _as_it_makes_it(lse: Tensor) -> Tensor:
    """``[B, H, S]`` with heads innermost in memory."""
    return lse.transpose(1, 2).contiguous().transpose(1, 2)
