"""torch's flash attention operator, the same on NVIDIA and AMD, on boxes and causal squares (`kernels.pieces`).

A vendor's folder says on which devices it may be counted on.
"""

from __future__ import annotations

import torch
from torch import Tensor

from burst_portable.kernels.contract import Gradients
from burst_portable.kernels.merged_once import MergedOnceKernel
from burst_portable.kernels.steps import in_steps
from burst_portable.numerics import State


class AtenFlashKernel(MergedOnceKernel):
    """See `kernels.contract.Kernel`; `supports` is the vendor's."""

    name = "flash"

    def ready(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """It loads 16 bytes at once, at whatever strides it is given."""
        return in_steps(super().ready(x, dtype))

    def operate(self, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> State:
        operator = torch.ops.aten._flash_attention_forward
        # No lengths of several sequences, no dropout, no probabilities.
        out, lse, *_ = operator(q, k, v, None, None, q.shape[1], k.shape[1], 0.0, causal, False, scale=scale)
        return out, lse

    def operate_backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float
    ) -> Gradients:
        operator = torch.ops.aten._flash_attention_backward
        seed = torch.zeros((), dtype=torch.int64, device=q.device)  # of dropout, which there is not
        dq, dk, dv = operator(
            dout, q, k, v, out, lse, None, None, q.shape[1], k.shape[1], 0.0, causal, seed, seed, scale=scale
        )
        return dq, dk, dv
