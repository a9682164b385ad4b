"""Define a kernel on torch's CPU flash attention operator.

The operator supports boxes, top-left causal boxes, and masks as floating tensors. So a tile becomes::

    full               ■       one box
    causal             ■◣      a box of the columns that are visible to every row, and an aligned causal box
    anything else              strips of rows, each a box, with a small mask if it is not full

Tiles have no empty rows, so its convention for them (LSE 0) does not matter. 16-bit inputs are computed in float32:
the operator is several times slower in 16 bits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from burst_portable.kernels.base import Gradients, Support, torch_dtype
from burst_portable.kernels.operator_kernel import OperatorKernel
from burst_portable.numerics import State
from burst_portable.planning.call import AttentionCall
from burst_portable.planning.tiles import Tile

STRIP = 256
"""Rows of a strip: its mask holds STRIP x (STRIP + window) numbers."""

_LANES = 16
"""Numbers in the widest vector of a CPU. With fewer columns, the operator finds the largest score in another way."""


_FORWARD: Any = torch._scaled_dot_product_flash_attention_for_cpu
_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


class CpuCall(NamedTuple):
    """One call of the operator: a box and its mask."""

    rows: slice
    columns: slice
    causal: bool = False
    cut_by: Tile | None = None

    def mask(self, dtype: torch.dtype) -> Tensor | None:
        """Return 0 where a pair is visible and -inf elsewhere; None if all pairs are visible."""
        if self.cut_by is None:
            return None
        tile = self.cut_by
        ends = (tile.q_start, tile.q_stop), (tile.k_start, tile.k_stop)
        rows, columns = (torch.arange(*each, device="cpu") for each in ends)  # the operator also reads hidden pairs
        distance = rows.unsqueeze(1) - columns
        hidden = (distance < tile.lo) | (distance > tile.hi)
        return hidden.new_zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, -torch.inf)


class CpuFlashKernel(OperatorKernel[CpuCall]):
    """Call torch's CPU flash attention operator on boxes, causal boxes and masked strips."""

    name = "cpu_flash"

    def supports(self, call: AttentionCall) -> Support:
        if call.device != "cpu":
            return Support(False, f"it takes CPU tensors, not {call.device}")
        dtype = torch_dtype(call)
        if not dtype.is_floating_point or dtype.itemsize < 2:
            return Support(False, f"it does not take {call.dtype}")
        if call.v_head_dim != call.head_dim:
            return Support(False, f"values of size {call.v_head_dim} differ from heads of size {call.head_dim}")
        if call.softcap is not None:
            return Support(False, "it has no softcap")
        if not call.positive_scale:
            return Support(False, "it masks with -inf before it scales, so the scale must be positive")
        return Support(True)

    def split_tile(self, tile: Tile) -> Iterator[CpuCall]:
        rows = slice(tile.q_start, tile.q_stop)
        if tile.full:
            yield CpuCall(rows, slice(tile.k_start, tile.k_stop))
        elif tile.hi >= tile.q_stop - 1 - tile.k_start:
            diagonal = tile.q_start - tile.lo  # the last column that the first row sees
            if diagonal > tile.k_start:
                yield CpuCall(rows, slice(tile.k_start, diagonal))
            yield CpuCall(rows, slice(diagonal, tile.k_stop), causal=True)
        else:
            for start in range(tile.q_start, tile.q_stop, STRIP):
                strip = tile.clipped(start, min(start + STRIP, tile.q_stop), tile.k_start, tile.k_stop)
                assert strip is not None, "a tile has no empty rows"
                box = slice(strip.q_start, strip.q_stop), slice(strip.k_start, strip.k_stop)
                yield CpuCall(*box, cut_by=None if strip.full else strip)

    def prepare_operands(self, dtype: torch.dtype, *tensors: Tensor) -> Sequence[Tensor]:
        """Return the tensors in the dtype of the computation, without overlapping rows or heads."""
        wide = torch.float64 if dtype is torch.float64 else torch.float32
        separate = [x.contiguous() if _overlaps(x) else x for x in tensors]
        return [x if x.dtype is wide else x.to(wide) for x in separate]

    def run_forward(self, q: Tensor, k: Tensor, v: Tensor, part: CpuCall, call: AttentionCall) -> State:
        mask = None if part.cut_by is None else part.mask(q.dtype)
        out, lse = _FORWARD(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), 0.0, part.causal, attn_mask=mask, scale=call.scale
        )
        if k.shape[1] < _LANES:
            _show_nan(out, lse, q, k)
        return out.transpose(1, 2), lse

    def run_backward(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        part: CpuCall,
        call: AttentionCall,
    ) -> Gradients:
        heads_first = (x.transpose(1, 2) for x in (dout, q, k, v, out))
        lse = lse.transpose(1, 2).contiguous().transpose(1, 2)  # heads innermost, as the forward operator returns it
        mask = None if part.cut_by is None else part.mask(q.dtype)
        parts = _BACKWARD(*heads_first, lse, 0.0, part.causal, attn_mask=mask, scale=call.scale)
        dq, dk, dv = (x.transpose(1, 2) for x in parts)
        return dq, dk, dv


def _overlaps(x: Tensor) -> bool:
    """Return whether rows or heads begin within others, as those of `unfold` do.

    torch makes results "like" q. If another stride of q is 1 too, their heads or rows may become innermost, but the
    operator writes as if numbers of a head were. A stride of 0, as in expanded tensors, is harmless.
    """
    *sizes, dim = x.shape
    return any(size > 1 and 0 < stride < dim for size, stride in zip(sizes, x.stride(), strict=False))


def _show_nan(out: Tensor, lse: Tensor, q: Tensor, k: Tensor) -> None:
    """Set rows with NaN scores to NaN. With few columns, the operator takes such rows for empty: out 0, LSE 0."""
    scores = torch.einsum("bshgd,bchd->bhgsc", q.unflatten(2, (k.shape[2], -1)), k).flatten(1, 2)
    lost = (lse == 0) & scores.isnan().any(-1)
    lse.masked_fill_(lost, torch.nan)
    out.masked_fill_(lost.unsqueeze(-1), torch.nan)
