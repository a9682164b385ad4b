"""The Hopper kernel with flash-attn-4 beside it, which is asked where it was measured to be faster."""

from __future__ import annotations

from torch import Tensor

from burst_portable.backends.cuda.hopper.kernel import HopperKernel
from burst_portable.errors import BackendUnavailableError
from burst_portable.kernels import base as whole
from burst_portable.kernels.base import Gradients, Kernel, KernelProblem, Options, Support, takes_windows
from burst_portable.kernels.operator_kernel import Triangle, causal_window, only_piece, triangles
from burst_portable.numerics import State
from burst_portable.planning.tiles import Tiles

FORWARD, BACKWARD = (64,), (64, 128)
"""Head sizes at which flash-attn-4 was faster on one H100: benchmarks/results/history-kernels.md."""
LONG = 16384
"""Rows and keys from which its forward was faster with heads of 128 too, except where each query head has its own keys.

In 109 to 221 rounds, times its speed (attention-h100-pairs-2026-11-23.json), ours reached 0.985 and 0.979 in squares of
16,384 and 32,768 without a mask and 0.980 in a causal one of 32,768 with 8 K/V heads for 32, but 1.012 with 16 for 16.
"""
LEAST = 5e10
"""Pairs times query heads times head size from which it is asked at all.

Under that its host takes longer than the device. Least microseconds of the host for a call on one H100
(attention-h100-portable-2026-11-23.json), ours and then flash-attn-4's: 51 and 107 forward, 89 and 193 backward. In a
causal square of 4,096 with 32 heads of 128, 3.4e10, ours was 1.3 % faster backward; without a mask, 6.9e10, 5 % slower.
"""
WINDOW_BACKWARD = (128,)
"""Head sizes at which it was faster on one H100 backward with a causal window, if K and V have as many heads as Q.

Measured with 16,384 tokens and window:1024, TFLOP/s in turns, ours and then flash-attn-4: 412 and 435 with 32 heads,
but 424 and 358 with 8 K/V heads for 32. Forward ours led, 500 and 482. Heads of 64 were not measured.
"""


class HopperFlash4Kernel(HopperKernel):
    """`HopperKernel`, but an attention that is one box or one causal square goes to flash-attn-4.

    So do gradients of a causal window, from a version on that is known to obey. That package knows no other masks, and
    what it gives in 16 bits would have to be merged. So this is for calls that compute all (`kernels.base`); steps of
    a ring stay with our own kernel.
    """

    name = "hopper+flash-attn-4"
    faster_squares = True

    def __init__(self, flash: Kernel) -> None:
        super().__init__()
        self._flash = flash

    def supports(self, problem: KernelProblem) -> Support:
        """Where ours declines, the package is not looked at."""
        own = super().supports(problem)
        if not own.ok:
            return own
        try:
            return self._flash.supports(problem)
        except BackendUnavailableError as error:  # broken; `auto` does without it, and whoever names it hears why
            return Support(False, str(error))

    def attend_whole(self, q: Tensor, k: Tensor, v: Tensor, tiles: Tiles, options: Options) -> State:
        """See `kernels.base`: out in the dtype of q."""
        if _allowed(q, tiles, options) and _faster_forward(q, k, tiles):
            return whole.attend_whole(self._flash, q, k, v, tiles, options)
        return super().attend_whole(q, k, v, tiles, options)

    def gradients(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        tiles: Tiles,
        options: Options,
    ) -> Gradients:
        """See `kernels.base`: all in 16 bits where flash-attn-4 makes them."""
        if _allowed(q, tiles, options) and self._faster_backward(q, k, tiles):
            return whole.gradients(self._flash, dout, q, k, v, out, lse, tiles, options)
        return super().gradients(dout, q, k, v, out, lse, tiles, options)

    def _faster_backward(self, q: Tensor, k: Tensor, tiles: Tiles) -> bool:
        if causal_window(tiles, q.shape[1], k.shape[1]) is None:
            return q.shape[3] in BACKWARD and _one_piece(q, k, tiles) is not None
        return q.shape[3] in WINDOW_BACKWARD and q.shape[2] == k.shape[2] and takes_windows(self._flash)


def _allowed(q: Tensor, tiles: Tiles, options: Options) -> bool:
    """Whether there is enough to compute, and no option that `supports` declines came all the same."""
    batch, _, heads, dim = q.shape
    enough = tiles.area * batch * heads * dim >= LEAST and q.numel() > 0
    return enough and not options.deterministic and options.softcap is None and options.positive_scale


def _faster_forward(q: Tensor, k: Tensor, tiles: Tiles) -> bool:
    long = min(q.shape[1], k.shape[1]) >= LONG
    if q.shape[3] not in FORWARD and not long:
        return False
    piece = _one_piece(q, k, tiles)
    if piece is None:
        return False
    return q.shape[3] in FORWARD or not piece.causal or q.shape[2] != k.shape[2]


def _one_piece(q: Tensor, k: Tensor, tiles: Tiles) -> Triangle | None:
    """The box or the causal square that is all, or None."""
    piece = only_piece((piece for tile in tiles for piece in triangles(tile)), q.shape[1], k.shape[1])
    return None if piece is None or piece.reversed else piece
