"""Define `HopperFlash4Kernel`, which calls flash-attn-4 for the calls on which it was measured to be faster."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from itertools import islice

import torch
from torch import Tensor

from burst_portable.backends.cuda.hopper.flash4_speeds import BACKWARD, FORWARD, is_faster
from burst_portable.backends.cuda.hopper.kernel import HopperKernel
from burst_portable.errors import BackendUnavailableError
from burst_portable.kernels.base import BackwardInputs, Gradients, LazyKernel, Support
from burst_portable.kernels.operator_kernel import causal_squares, causal_window, single_operator_call
from burst_portable.kernels.packed_documents import find_documents
from burst_portable.numerics import State
from burst_portable.planning.call import AttentionCall
from burst_portable.planning.tiles import Tiles

LEAST = {FORWARD: 1.5e10, BACKWARD: 8e9}
"""Minimum of pairs times query heads times head size for which flash-attn-4 computes a pass.

Heads below 64 count as 64. Below it, the package may take longer on the host than on the device: 107 to 180 us for a
forward and 161 us for a backward pass on the host of one H200, and up to twice as long if other processes load it. With
4,096 tokens and heads of 192, a window of 1,024 (1.1e10) took 100 us of the device forward and 314 us backward.
"""


class HopperFlash4Kernel(HopperKernel):
    """`HopperKernel` that lets flash-attn-4 compute large calls that are one box or one causal square.

    flash-attn-4 also computes a causal window, packed documents, and a softcap, if its version supports them. It
    supports no other masks, and its 16-bit results would have to be merged. So it is called only if one launch computes
    the whole attention. `HopperKernel` computes the steps of a ring.
    """

    name = "hopper+flash-attn-4"
    traits = replace(HopperKernel.traits, prefers_square=True)

    def __init__(self, flash: LazyKernel) -> None:
        super().__init__()
        self._flash = flash

    def supports(self, call: AttentionCall) -> Support:
        """Return whether both kernels support the call. If ours does not, flash-attn-4 is not imported."""
        own = super().supports(call)
        if not own.ok:
            return own
        try:
            return self._flash.supports(call)._replace(slower=own.slower)
        except BackendUnavailableError as error:  # `auto` then skips this kernel; a call that names it gets the reason
            return Support(False, str(error))

    def forward_single_call(
        self, q: Tensor, k: Tensor, v: Tensor, tiles: Tiles, call: AttentionCall, *, yields_to_comm: bool = False
    ) -> State:
        """Return out in the dtype of q."""
        if self._prefers_package(FORWARD, q, k, v, tiles, call):
            if q.is_meta:  # flash-attn-4 compiles its kernels itself
                out = q.new_empty(*q.shape[:3], v.shape[3])
                return out, q.new_empty(q.shape[0], q.shape[2], q.shape[1], dtype=torch.float32)
            return self._flash.load().forward_single_call(q, k, v, tiles, call)
        return super().forward_single_call(q, k, v, tiles, call, yields_to_comm=yields_to_comm)

    def backward_single_call(self, x: BackwardInputs, tiles: Tiles, call: AttentionCall) -> Gradients:
        """Return gradients in 16 bits if flash-attn-4 computes them."""
        if self._prefers_package(BACKWARD, x.q, x.k, x.v, tiles, call):
            if x.q.is_meta:
                return torch.empty_like(x.q), torch.empty_like(x.k), torch.empty_like(x.v)
            return self._flash.load().backward_single_call(x, tiles, call)
        return super().backward_single_call(x, tiles, call)

    def _prefers_package(self, which: int, q: Tensor, k: Tensor, v: Tensor, tiles: Tiles, call: AttentionCall) -> bool:
        """Return whether flash-attn-4 computes a pass: it can, and is expected to be faster (`flash4_speeds`)."""
        if call.deterministic or not call.positive_scale or not q.numel():
            return False
        batch, rows, heads, dim = q.shape
        pairs = tiles.num_pairs * batch * heads
        if pairs * max(dim, 64) < LEAST[which]:
            return False
        kind = kind_of(tiles, rows, k.shape[1], heads != k.shape[2])
        if call.softcap is not None:
            kind = "softcap" if kind == "causal" else ""
        if not kind or not is_faster(kind, (dim, v.shape[3]), which, pairs):
            return False
        traits = self._flash.load().traits
        if kind.startswith("documents"):
            return traits.supports_documents
        return kind != "window" or traits.supports_causal_window


@lru_cache(maxsize=512)
def kind_of(tiles: Tiles, rows: int, keys: int, has_shared_heads: bool) -> str:
    """Return the key of `flash4_speeds.SPEEDS` for a whole call; "" if there is none.

    Args:
        tiles: Visible pairs.
        rows: Queries of the call.
        keys: Keys of the call.
        has_shared_heads: Whether several query heads share a K/V head.
    """
    if find_documents(tiles, rows, keys) is not None:
        return "documents, shared heads" if has_shared_heads else "documents"
    if causal_window(tiles, rows, keys) is not None:
        return "" if has_shared_heads else "window"
    parts = (part for tile in tiles for part in causal_squares(tile))
    part = single_operator_call(list(islice(parts, 2)), rows, keys)  # two show that there is none
    if part is None or part.reversed:
        return ""
    return "shared heads" if has_shared_heads else "causal" if part.causal else "full"
