"""Define `HopperFlash4Kernel`, which calls flash-attn-4 for the calls on which it was measured to be faster.

The constants contain the measured limits. "Ours" is `HopperKernel`.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import islice

import torch
from torch import Tensor

from burst_portable.backends.cuda.hopper.kernel import HopperKernel
from burst_portable.errors import BackendUnavailableError
from burst_portable.kernels.base import BackwardInputs, Gradients, LazyKernel, Support
from burst_portable.kernels.operator_kernel import CausalSquare, causal_squares, causal_window, single_operator_call
from burst_portable.numerics import State
from burst_portable.planning.call import AttentionCall
from burst_portable.planning.tiles import Tiles

FORWARD, BACKWARD = (64, 80, 96), (64, 80, 112, 128, 192)
"""Head sizes for which flash-attn-4 was faster on one H100. Values have the same size, but 128 for heads of 192.

Its speed divided by ours, with 16,384 tokens, a causal mask and 16 heads
(benchmarks/results/large-heads-h100-2026-11-24.json)::

    head size    64      80      96      112     128     192/128
    forward      1.06    1.16    1.14    0.87    0.96    1.00
    backward     1.05    1.03    1.01    1.09    1.04    1.09

With heads of 96 and 8 K/V heads for 32 query heads, it was 0.98 backward.
"""
LONG, LONG_HEADS = 16384, (128,)
"""Number of queries and keys from which its forward was faster for these head sizes too.

The exception is a causal mask with as many K/V heads as query heads. The speed of ours divided by its speed, in 109 to
221 rounds (benchmarks/attention.py, 2026-11-23), was 0.985 and 0.979 in squares of 16,384 and 32,768 tokens without a
mask. In a causal square of 32,768 tokens it was 0.980 with 8 K/V heads for 32 query heads, but 1.012 with 16 for 16.
"""
LEAST = 5e10
"""Minimum of pairs times query heads times head size for which flash-attn-4 is called.

Below it, its host time is longer than its device time. The minimum host time per call on one H100
(benchmarks/attention.py, 2026-11-23) was 51 us for ours and 107 us for flash-attn-4 forward, 89 us and 193 us backward.
In a causal square of 4,096 tokens with 32 heads of 128 (3.4e10), ours was 1.3 % faster backward. Without a mask
(6.9e10), it was 5 % slower.
"""
WINDOW_BACKWARD = (128,)
"""Head sizes for which its backward with a causal window was faster on one H100, if K and V have as many heads as Q.

Both were measured alternately with 16,384 tokens and window:1024. With 32 heads, ours reached 412 TFLOP/s and
flash-attn-4 435. With 8 K/V heads for 32 query heads, ours reached 424 and flash-attn-4 358. The forward of ours was
faster: 500 against 482. Heads of 64 were not measured.
"""


class HopperFlash4Kernel(HopperKernel):
    """`HopperKernel` that lets flash-attn-4 compute large calls that are one box or one causal square.

    flash-attn-4 also computes the gradients of a causal window, if its version supports windows. It supports no other
    masks, and its 16-bit results would have to be merged. So it is called only if one launch computes the whole
    attention. `HopperKernel` computes the steps of a ring.
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
        if _allowed(q, tiles, call) and _faster_forward(q, k, tiles):
            if q.is_meta:  # flash-attn-4 compiles its kernels itself
                out = q.new_empty(*q.shape[:3], v.shape[3])
                return out, q.new_empty(q.shape[0], q.shape[2], q.shape[1], dtype=torch.float32)
            return self._flash.load().forward_single_call(q, k, v, tiles, call)
        return super().forward_single_call(q, k, v, tiles, call, yields_to_comm=yields_to_comm)

    def backward_single_call(self, x: BackwardInputs, tiles: Tiles, call: AttentionCall) -> Gradients:
        """Return gradients in 16 bits if flash-attn-4 computes them."""
        if _allowed(x.q, tiles, call) and self._faster_backward(x.q, x.k, tiles):
            if x.q.is_meta:
                return torch.empty_like(x.q), torch.empty_like(x.k), torch.empty_like(x.v)
            return self._flash.load().backward_single_call(x, tiles, call)
        return super().backward_single_call(x, tiles, call)

    def _faster_backward(self, q: Tensor, k: Tensor, tiles: Tiles) -> bool:
        if causal_window(tiles, q.shape[1], k.shape[1]) is None:
            return q.shape[3] in BACKWARD and _single_call(q, k, tiles) is not None
        return (
            q.shape[3] in WINDOW_BACKWARD
            and q.shape[2] == k.shape[2]
            and self._flash.load().traits.supports_causal_window
        )


def _allowed(q: Tensor, tiles: Tiles, call: AttentionCall) -> bool:
    """Return whether the call is large enough, is not deterministic, and has no softcap and a positive scale."""
    batch, _, heads, dim = q.shape
    enough = tiles.num_pairs * batch * heads * dim >= LEAST and q.numel() > 0
    return enough and not call.deterministic and call.softcap is None and call.positive_scale


def _faster_forward(q: Tensor, k: Tensor, tiles: Tiles) -> bool:
    long = q.shape[3] in LONG_HEADS and min(q.shape[1], k.shape[1]) >= LONG
    if q.shape[3] not in FORWARD and not long:
        return False
    part = _single_call(q, k, tiles)
    if part is None:
        return False
    return q.shape[3] in FORWARD or not part.causal or q.shape[2] != k.shape[2]


def _single_call(q: Tensor, k: Tensor, tiles: Tiles) -> CausalSquare | None:
    """Return the box or the causal square that covers the whole call; None if there is none."""
    parts = (part for tile in tiles for part in causal_squares(tile))
    part = single_operator_call(list(islice(parts, 2)), q.shape[1], k.shape[1])  # two show that there is none
    return None if part is None or part.reversed else part
