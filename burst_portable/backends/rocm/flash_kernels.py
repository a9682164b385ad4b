"""Define kernels on torch's flash attention for ROCm and on AITER, AMD's own attention kernels.

Import AITER only through `kernels.base.LazyKernel`. It is called only for boxes and causal squares (`operator_kernel`):
its causal mask is aligned bottom-right, and its gradients have 16 bits. We call the functions that its own autograd
function calls. Their parameters have changed between releases, so they are passed by name, and a release that lacks one
is declined.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from importlib import import_module
from inspect import signature
from typing import Any

import torch
from torch import Tensor

from burst_portable.backends.rocm.device import architecture
from burst_portable.kernels.base import Gradients, Support
from burst_portable.kernels.operator_kernel import AcceleratorKernel, AtenFlashKernel, declined_by_flash
from burst_portable.numerics import State
from burst_portable.planning.call import AttentionCall

ARCHITECTURES = ("gfx90a", "gfx942", "gfx950")
LARGEST_HEAD = 256


def declined(call: AttentionCall) -> str:
    """Return why no flash attention for AMD, of torch or of AITER, can serve a call; "" if one can."""
    if reason := declined_by_flash(call, LARGEST_HEAD):
        return reason
    if call.deterministic:
        return "the order of additions in its backward is not documented; it serves deterministic=False only"
    return device_reason(call.device)


@lru_cache(maxsize=8)
def device_reason(device: str) -> str:
    """Return why a device is unsupported: all GPUs must be chips for which AMD's libraries have code."""
    if torch.version.hip is None or device != "cuda":
        return f"it runs on AMD GPUs with torch for ROCm, not on {device}"
    chips = [architecture(torch.cuda.get_device_properties(i)) for i in range(torch.cuda.device_count())]
    unsupported = sorted(set(chips).difference(ARCHITECTURES))
    return f"it supports {', '.join(ARCHITECTURES)}, not {', '.join(unsupported)}" if unsupported else ""


class RocmFlashKernel(AtenFlashKernel):
    """Call torch's flash attention for ROCm."""

    def supports(self, call: AttentionCall) -> Support:
        if reason := declined(call):
            return Support(False, reason)
        if not torch.backends.cuda.is_flash_attention_available():
            return Support(False, "this torch is built without flash attention")
        return Support(True)


_NOTHING: dict[str, Any] = {
    "dropout_p": 0.0,
    "window_size_left": -1,
    "window_size_right": -1,
    "alibi_slopes": None,
    "bias": None,
}
"""Arguments of forward and backward that switch features off. Older releases have no bias."""
_FORWARD = {**_NOTHING, "return_lse": True, "return_softmax": False}
_BACKWARD = {**_NOTHING, "dbias": None, "deterministic": False, "rng_state": None}
_NEEDED = {
    "_flash_attn_forward": {"q", "k", "v", "softmax_scale", "causal", *_FORWARD} - {"bias"},
    "_flash_attn_backward": {"dout", "q", "k", "v", "out", "softmax_lse", "dq", "dk", "dv", "softmax_scale", "causal"}
    | (_BACKWARD.keys() - {"bias", "dbias"}),
}


class AiterKernel(AcceleratorKernel):
    """Call AITER's flash attention."""

    name = "aiter"

    def __init__(self) -> None:
        self._module = import_module("aiter.ops.mha")
        self._missing = self._missing_parameters()

    def supports(self, call: AttentionCall) -> Support:
        reason = declined(call) or self._missing
        return Support(not reason, reason)

    def operate(self, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> State:
        function = self._module._flash_attn_forward
        out, lse, *_ = function(q=q, k=k, v=v, softmax_scale=scale, causal=causal, **_known(function, _FORWARD))
        return out, lse

    def operate_backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float
    ) -> Gradients:
        function = self._module._flash_attn_backward
        dq, dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
        function(
            dout=dout, q=q, k=k, v=v, out=out, softmax_lse=lse, dq=dq, dk=dk, dv=dv,
            softmax_scale=scale, causal=causal, **_known(function, _BACKWARD),
        )  # fmt: skip
        return dq, dk, dv

    def _missing_parameters(self) -> str:
        """Return which function or parameters the installed release lacks; "" if none."""
        for name, needed in _NEEDED.items():
            function = getattr(self._module, name, None)
            missing = (
                sorted(needed.difference(signature(function).parameters)) if callable(function) else ["the function"]
            )
            if missing:
                return f"this release of AITER is not supported: aiter.ops.mha.{name} lacks {', '.join(missing)}"
        return ""


def _known(function: Callable[..., object], values: dict[str, Any]) -> dict[str, Any]:
    """Return the values for which this release has a parameter."""
    return {name: value for name, value in values.items() if name in signature(function).parameters}
