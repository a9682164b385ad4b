"""Define `numerics.merge_into` in one pass over memory, for the operator calls of `kernels.operator_kernel`.

torch's operators need several passes: 26 bytes per merged 16-bit number instead of 10.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from burst_portable.kernels.triton.common import head_of
from burst_portable.kernels.triton.prepared import (
    Launch,
    architecture,
    layout_of,
    number_strides,
    on_device_of,
    padded,
    strides,
)
from burst_portable.numerics import State

_ROWS = 32
_KEPT = 256


@triton.jit(do_not_specialize=["rows", "heads", "blocks"])  # else each length compiles again
def merge_kernel(
    total, total_lse, part, part_lse,
    total_batch, total_row, total_head, part_batch, part_row, part_head,
    lse_batch, lse_head, lse_row, part_lse_batch, part_lse_head, part_lse_row,
    rows, heads, blocks,
    R: tl.constexpr, DV: tl.constexpr, PADDED_DV: tl.constexpr,
):  # fmt: skip
    """Merge R rows. Weights have the dtype of the state's LSE."""
    line = tl.program_id(0) // blocks  # of [B·H]
    batch, head = line // heads, line % heads
    mine = tl.program_id(0) % blocks * R + tl.arange(0, R)
    wide = mine.to(tl.int64)
    inside = mine < rows
    kept = head_of(total_lse, batch, head, lse_batch, lse_head, False) + wide * lse_row
    came = head_of(part_lse, batch, head, part_lse_batch, part_lse_head, False) + wide * part_lse_row
    before = tl.load(kept, mask=inside, other=float("-inf"))
    new = tl.load(came, mask=inside, other=float("-inf")).to(before.dtype)
    tl.debug_barrier()  # several warps read each LSE before one of them writes it below
    top = tl.maximum(before, new, propagate_nan=tl.PropagateNan.ALL)
    anchor = tl.where(top == float("-inf"), 0.0, top)  # -inf - -inf would be NaN
    stays, comes = tl.exp(before - anchor), tl.exp(new - anchor)
    both = stays + comes
    tl.store(kept, top + tl.log(tl.where(both == 0.0, 1.0, both)), mask=inside)
    share = 1.0 / tl.where(both == 0.0, 1.0, both)
    inner = tl.arange(0, PADDED_DV)
    keep = inside[:, None] & (inner < DV)[None, :]
    here = head_of(total, batch, head, total_batch, total_head, False) + wide[:, None] * total_row + inner[None, :]
    there = head_of(part, batch, head, part_batch, part_head, False) + wide[:, None] * part_row + inner[None, :]
    out = tl.load(here, mask=keep, other=0.0)
    added = tl.load(there, mask=keep, other=0.0).to(out.dtype)
    merged = out * (stays * share).to(out.dtype)[:, None] + added * (comes * share).to(out.dtype)[:, None]
    tl.store(here, merged, mask=keep)


class OnePass:
    """Merge like `numerics.merge_into`. The launch of each shape is prepared once."""

    def __init__(self) -> None:
        self._launches: dict[object, Launch] = {}

    def __call__(self, state: State, out: Tensor, lse: Tensor) -> None:
        total, total_lse = state
        tensors = (total, total_lse, out if out.stride(-1) == 1 else out.contiguous(), lse)
        assert total.stride(-1) == 1, "a running out is dense"
        key = (*map(layout_of, tensors),)
        launch = self._launches.get(key) or self._keep(key, _launch(*tensors))
        if launch.programs:
            with on_device_of(total):
                launch(*tensors)

    def _keep(self, key: object, launch: Launch) -> Launch:
        if len(self._launches) >= _KEPT:
            self._launches.clear()
        self._launches[key] = launch
        return launch


def _launch(total: Tensor, total_lse: Tensor, part: Tensor, part_lse: Tensor) -> Launch:
    batch, rows, heads, size = total.shape
    blocks = triton.cdiv(rows, _ROWS)
    constants = {"R": _ROWS, "DV": size, "PADDED_DV": padded(size), "num_warps": 4}
    sizes = (*strides(total, part), *number_strides(total_lse, part_lse), rows, heads, blocks)
    return Launch(merge_kernel, blocks * batch * heads, None, sizes, constants, f"{architecture()}, {part.dtype}")
