"""torch's flash attention operator, the same on NVIDIA and AMD, on boxes and causal squares (`operator_kernel`).

A vendor's folder says on which devices it can be relied on.
"""

from __future__ import annotations

import torch
from torch import Tensor

from burst_portable.kernels.base import Gradients, KernelProblem
from burst_portable.kernels.operator_kernel import MergedOnceKernel
from burst_portable.numerics import State


def declined(problem: KernelProblem, largest_head: int) -> str:
    """Why no flash attention, be it torch's or a vendor's, can serve a problem; "" where the vendor decides."""
    if problem.dtype not in (torch.bfloat16, torch.float16):
        return f"it takes bfloat16 and float16, not {problem.dtype}"
    if problem.value_dim != problem.head_dim:
        return f"values of size {problem.value_dim} differ from heads of size {problem.head_dim}"
    if problem.head_dim % 8 or problem.head_dim > largest_head:
        return f"it takes head sizes that are multiples of 8 up to {largest_head}, not {problem.head_dim}"
    if problem.heads % problem.kv_heads:
        return f"{problem.heads} heads are not a multiple of {problem.kv_heads} K/V heads"
    if problem.softcap:
        return "it is not asked for a softcap"
    if not problem.positive_scale:
        return "it is not asked for scales that are not positive"
    return ""


class AtenFlashKernel(MergedOnceKernel):
    """See `kernels.base.Kernel`; `supports` is the vendor's."""

    name = "flash"

    def operate(self, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> State:
        operator = torch.ops.aten._flash_attention_forward
        # No lengths of several sequences, no dropout, no probabilities.
        out, lse, *_ = operator(q, k, v, None, None, q.shape[1], k.shape[1], 0.0, causal, False, scale=scale)
        return out, lse

    def operate_backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float
    ) -> Gradients:
        operator = torch.ops.aten._flash_attention_backward
        seed = torch.zeros((), dtype=torch.int64, device=q.device)  # of dropout, which is not used
        dq, dk, dv = operator(
            dout, q, k, v, out, lse, None, None, q.shape[1], k.shape[1], 0.0, causal, seed, seed, scale=scale
        )
        return dq, dk, dv
