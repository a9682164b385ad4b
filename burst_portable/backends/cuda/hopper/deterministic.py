"""Define `HopperTritonKernel`, which serves deterministic calls: a Hopper forward and a portable backward.

The Hopper backward for heads of up to 128 adds to dQ in any order. On one H100 with heads of 128, the Hopper forward
reached 698 TFLOP/s where the portable one reached 509 (benchmarks/attention.py, row causal-16k, 2026-11-23).
"""

from __future__ import annotations

from dataclasses import replace

from burst_portable.backends.cuda.hopper.configs import split_configs
from burst_portable.backends.cuda.hopper.kernel import HopperKernel
from burst_portable.kernels.base import BackwardInputs, Gradients, Kernel, LazyKernel, Support
from burst_portable.planning.call import AttentionCall
from burst_portable.planning.tiles import Tiles


class HopperTritonKernel(HopperKernel):
    """`HopperKernel` with the portable backward, for deterministic calls that `HopperKernel` alone declines.

    Args:
        portable: The portable kernels.
    """

    name = "hopper+triton"

    def __init__(self, portable: Kernel | LazyKernel) -> None:
        super().__init__()
        self._backward = portable

    def supports(self, call: AttentionCall) -> Support:
        """Return whether both kernels serve the call, and `HopperKernel` alone does not."""
        forward = super().supports(replace(call, deterministic=False))
        if not forward.ok:
            return forward
        if not call.deterministic or split_configs(call.head_dim, call.v_head_dim):
            return Support(False, "it serves deterministic calls with heads of up to 128; hopper serves this one alone")
        return self._backward.supports(call)._replace(slower=forward.slower)

    def attend_backward(self, x: BackwardInputs, tiles: Tiles, call: AttentionCall, *, into: Gradients) -> None:
        self._backward.load().attend_backward(x, tiles, call, into=into)

    def backward_single_call(self, x: BackwardInputs, tiles: Tiles, call: AttentionCall) -> Gradients:
        return self._backward.load().backward_single_call(x, tiles, call)
