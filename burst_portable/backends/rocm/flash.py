"""torch's flash attention operator on AMD GPUs: AOTriton, or CK where torch was told so.

It is asked only for boxes and causal squares (`kernels.pieces`). One reason is that its windows and rectangular causal
masks are aligned bottom-right; also, AOTriton's backward refuses causal rectangles, and in older builds of torch it
accepts a window and ignores it.
"""

from __future__ import annotations

from functools import lru_cache

import torch

from burst_portable.backends.rocm.probe import architecture
from burst_portable.kernels import aten_flash
from burst_portable.kernels.contract import KernelProblem, Support

ARCHITECTURES = ("gfx90a", "gfx942", "gfx950")
LARGEST_HEAD = 256


def declined(problem: KernelProblem) -> str:
    """Why a flash attention of AMD's, be it torch's or AITER's, cannot serve a problem; "" if it can."""
    if reason := aten_flash.declined(problem, LARGEST_HEAD):
        return reason
    if problem.deterministic:
        return "nobody promises that its backward adds in the same order every time; it serves deterministic=False only"
    return _device_reason(problem.device)


@lru_cache(maxsize=8)
def _device_reason(device: str) -> str:
    """Why a device is not served: each must be a chip for which AMD's libraries have code."""
    if torch.version.hip is None or device != "cuda":
        return f"it runs on AMD GPUs with torch for ROCm, not on {device}"
    chips = [architecture(torch.cuda.get_device_properties(i)) for i in range(torch.cuda.device_count())]
    others = sorted(set(chips).difference(ARCHITECTURES))
    return f"it is known to be built for {', '.join(ARCHITECTURES)}, not for {', '.join(others)}" if others else ""


class RocmFlashKernel(aten_flash.AtenFlashKernel):
    """See `kernels.contract.Kernel`."""

    def supports(self, problem: KernelProblem) -> Support:
        if reason := declined(problem):
            return Support(False, reason)
        if not torch.backends.cuda.is_flash_attention_available():
            return Support(False, "this torch is built without flash attention")
        return Support(True)
