"""The Hopper kernel with flash-attn-4 beside it, which is asked where it was measured to be faster."""

from __future__ import annotations

from torch import Tensor

from burst_portable.backends.cuda.hopper.kernel import HopperKernel
from burst_portable.errors import BackendUnavailableError
from burst_portable.kernels import whole
from burst_portable.kernels.contract import Gradients, Kernel, KernelProblem, Options, Support
from burst_portable.kernels.pieces import only_piece, triangles
from burst_portable.numerics import State
from burst_portable.tiles import Tiles

FORWARD, BACKWARD = (64,), (64, 128)
"""Head sizes at which flash-attn-4 was faster on one H100: benchmarks/results/README.md."""


class HopperFlash4Kernel(HopperKernel):
    """`HopperKernel`, but an attention that is one box or one causal square goes to flash-attn-4.

    That package knows no other masks, and what it gives in 16 bits would have to be merged. So this is for calls that
    compute all (`kernels.whole`); steps of a ring stay with our own kernel.
    """

    name = "hopper+flash-attn-4"

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
        """See `kernels.whole`: out in the dtype of q."""
        if q.shape[3] in FORWARD and _serves(q, k, tiles, options):
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
        """See `kernels.whole`: all in 16 bits where flash-attn-4 makes them."""
        if q.shape[3] in BACKWARD and _serves(q, k, tiles, options):
            return whole.gradients(self._flash, dout, q, k, v, out, lse, tiles, options)
        return super().gradients(dout, q, k, v, out, lse, tiles, options)


def _serves(q: Tensor, k: Tensor, tiles: Tiles, options: Options) -> bool:
    """Whether flash-attn-4 may have it: one piece is all, and no option that `supports` declines came all the same."""
    if options.deterministic or options.softcap is not None or not options.positive_scale or q.numel() == 0:
        return False
    piece = only_piece((piece for tile in tiles for piece in triangles(tile)), q.shape[1], k.shape[1])
    return piece is not None and not piece.reversed
