"""The portable kernel with float32 products in TF32, for those who name it."""

from __future__ import annotations

from torch import float32

from burst_portable.kernels.contract import KernelProblem, Support
from burst_portable.kernels.triton.launch import TritonKernel


class Tf32Kernel(TritonKernel):
    """See `TritonKernel`. What is multiplied keeps 10 bits of its mantissa, as in torch with `allow_tf32`; sums, the
    softmax and what is merged stay float32.
    """

    name = "triton-tf32"
    rounding = 2**-10

    def __init__(self) -> None:
        super().__init__(float32_precision="tf32")

    def supports(self, problem: KernelProblem) -> Support:
        if problem.dtype is not float32:
            return Support(False, f"TF32 stands in for float32, not for {problem.dtype}; the kernel triton takes that")
        return super().supports(problem)
