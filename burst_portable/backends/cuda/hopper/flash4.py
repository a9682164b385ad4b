"""Define `HopperFlash4Kernel`, which calls flash-attn-4 where that was measured to be faster."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice

from torch import Tensor

from burst_portable.backends.cuda.hopper.kernel import HopperKernel
from burst_portable.errors import BackendUnavailableError
from burst_portable.kernels.base import BackwardInputs, Gradients, LazyKernel, Support
from burst_portable.kernels.operator_kernel import CausalSquare, causal_squares, causal_window, single_operator_call
from burst_portable.numerics import State
from burst_portable.planning.call import AttentionCall
from burst_portable.planning.tiles import Tiles

FORWARD, BACKWARD = (64, 80, 96), (64, 80, 112, 128)
"""Head sizes at which flash-attn-4 was faster on one H100, with values as large as heads.

At 16,384 tokens, causal, 16 heads (benchmarks/results/large-heads-h100-2026-11-24.json), its speed over ours was 1.06,
1.16, 1.14, 0.87 and 0.96 forward with heads of 64, 80, 96, 112 and 128; 1.05, 1.03, 1.01, 1.09 and 1.04 backward, and
0.98 with heads of 96 and 8 K/V heads for 32.
"""
LONG, LONG_HEADS = 16384, (128,)
"""Rows and keys from which its forward was faster with these heads too, except where each query head has its own keys.

In 109 to 221 rounds, times its speed (benchmarks/attention.py, 2026-11-23), ours reached 0.985 and 0.979 in squares of
16,384 and 32,768 without a mask and 0.980 in a causal one of 32,768 with 8 K/V heads for 32, but 1.012 with 16 for 16.
"""
LEAST = 5e10
"""Pairs times query heads times head size from which it is called at all.

Below that its host takes longer than the device. Least microseconds of the host for a call on one H100
(benchmarks/attention.py, 2026-11-23), ours and then flash-attn-4's: 51 and 107 forward, 89 and 193 backward. In a
causal square of 4,096 with 32 heads of 128, 3.4e10, ours was 1.3 % faster backward; without a mask, 6.9e10, 5 % slower.
"""
WINDOW_BACKWARD = (128,)
"""Head sizes at which it was faster on one H100 backward with a causal window, if K and V have as many heads as Q.

Measured with 16,384 tokens and window:1024, TFLOP/s in turns, ours and then flash-attn-4: 412 and 435 with 32 heads,
but 424 and 358 with 8 K/V heads for 32. Forward ours led, 500 and 482. Heads of 64 were not measured.
"""


class HopperFlash4Kernel(HopperKernel):
    """`HopperKernel`, but flash-attn-4 computes an attention that is one box or one causal square.

    It also computes the gradients of a causal window, from a version on that is known to support windows. That package
    supports no other masks, and its 16-bit results would have to be merged. So it is called only for an attention that
    one launch computes; our own kernel computes the steps of a ring.

    Args:
        flash: flash-attn-4.
    """

    name = "hopper+flash-attn-4"
    traits = replace(HopperKernel.traits, prefers_square=True)

    def __init__(self, flash: LazyKernel) -> None:
        super().__init__()
        self._flash = flash

    def supports(self, call: AttentionCall) -> Support:
        """Return whether both serve the call. If ours declines, the package is not imported."""
        own = super().supports(call)
        if not own.ok:
            return own
        try:
            return self._flash.supports(call)
        except BackendUnavailableError as error:  # broken; `auto` does without it, and whoever names it hears why
            return Support(False, str(error))

    def forward_single_call(
        self, q: Tensor, k: Tensor, v: Tensor, tiles: Tiles, call: AttentionCall, *, yields_to_comm: bool = False
    ) -> State:
        """Return out in the dtype of q."""
        if _allowed(q, tiles, call) and _faster_forward(q, k, tiles):
            return self._flash.load().forward_single_call(q, k, v, tiles, call)
        return super().forward_single_call(q, k, v, tiles, call, yields_to_comm=yields_to_comm)

    def backward_single_call(self, x: BackwardInputs, tiles: Tiles, call: AttentionCall) -> Gradients:
        """Return gradients in 16 bits if flash-attn-4 computes them."""
        if _allowed(x.q, tiles, call) and self._faster_backward(x.q, x.k, tiles):
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
    """Return whether there is enough to compute, and no setting that `supports` declines."""
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
    """Return the box or the causal square that is all of the call, or None."""
    part = single_operator_call(_first_two(tiles), q.shape[1], k.shape[1])
    return None if part is None or part.reversed else part


def _first_two(tiles: Tiles) -> list[CausalSquare]:
    """Return the first operator calls of the tiles: whether there is just one matters, not how many there are."""
    return list(islice((part for tile in tiles for part in causal_squares(tile)), 2))
