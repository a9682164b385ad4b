"""Define a kernel on torch's flash attention operator, which is the same on NVIDIA and AMD.

The folder of each vendor states the supported devices.
"""

from __future__ import annotations

import torch
from torch import Tensor

from burst_portable.kernels.base import Gradients
from burst_portable.kernels.operator_kernel import AcceleratorKernel
from burst_portable.numerics import State
from burst_portable.planning.call import AttentionCall


def declined(call: AttentionCall, largest_head: int) -> str:
    """Return why no flash attention of torch or a vendor can serve a call; "" if there is no general reason."""
    if call.dtype not in ("bfloat16", "float16"):
        return f"it takes bfloat16 and float16, not {call.dtype}"
    if call.v_head_dim != call.head_dim:
        return f"values of size {call.v_head_dim} differ from heads of size {call.head_dim}"
    if call.head_dim % 8 or call.head_dim > largest_head:
        return f"it takes head sizes that are multiples of 8 up to {largest_head}, not {call.head_dim}"
    if call.heads % call.kv_heads:
        return f"{call.heads} heads are not a multiple of {call.kv_heads} K/V heads"
    if call.softcap is not None:
        return "it has no softcap"
    if not call.positive_scale:
        return "it serves only positive scales"
    return ""


class AtenFlashKernel(AcceleratorKernel):
    """Call torch's flash attention operator. A subclass of each vendor defines `supports`."""

    name = "flash"

    def operate(self, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> State:
        operator = torch.ops.aten._flash_attention_forward
        # No cu_seqlens, no dropout, no probabilities.
        out, lse, *_ = operator(q, k, v, None, None, q.shape[1], k.shape[1], 0.0, causal, False, scale=scale)
        return out, lse

    def operate_backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float
    ) -> Gradients:
        operator = torch.ops.aten._flash_attention_backward
        seed = torch.zeros((), dtype=torch.int64, device=q.device)  # of dropout, which is off
        dq, dk, dv = operator(
            dout, q, k, v, out, lse, None, None, q.shape[1], k.shape[1], 0.0, causal, seed, seed, scale=scale
        )
        return dq, dk, dv
