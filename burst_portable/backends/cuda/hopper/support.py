"""Decide which calls `HopperKernel` supports on a device, and for which the portable kernels are faster."""

from __future__ import annotations

from functools import cache
from importlib.metadata import PackageNotFoundError, version

import torch

from burst_portable.planning.call import AttentionCall

TRITON_FROM, TRITON_BELOW = (3, 6), (3, 10)
"""First Triton version whose Gluon compiles these kernels, and first later version that is not supported.

See tests/backends/cuda/hopper/test_kernel_machine_code.py.
"""


def declined(call: AttentionCall) -> str:
    """Return the reason why the kernel does not support a call; "" if it supports it."""
    if call.dtype not in ("bfloat16", "float16"):
        return f"it takes bfloat16 and float16, not {call.dtype}"
    if max(call.head_dim, call.v_head_dim) > 256 or call.head_dim % 8 or call.v_head_dim % 8:
        return f"it takes head sizes that are multiples of 8 up to 256, not {call.head_dim} and {call.v_head_dim}"
    if call.v_head_dim > max(64, call.head_dim) and (call.head_dim <= 64 or call.v_head_dim > 128):
        return f"it has no cut for values of {call.v_head_dim} with heads of {call.head_dim}"
    if not call.positive_scale:
        return "it needs a positive scale"
    if reason := triton_reason() or device_reason(call.device):
        return reason
    return ""


SLOW_HEADS, SLOW_KEYS = 16, 3000
"""Largest head size, and mean keys per query from which the portable kernels were faster with it on one H200.

Their speed divided by ours, both passes, with 16 heads of 16 (benchmarks/attention.py --matrix, 2026-11-28)::

    tokens     causal    full    4 K/V heads    softcap    documents    window of 1,024
    4,096      0.86      1.04    0.73           0.85       0.55         0.73
    16,384     1.04      1.06    1.01           0.98       0.84         0.97
"""


def slower_reason(call: AttentionCall) -> str:
    """Return the reason why the portable kernels are faster for a call; "" if they are not."""
    if max(call.head_dim, call.v_head_dim) > SLOW_HEADS or call.num_pairs < SLOW_KEYS * call.layout.length:
        return ""
    return f"the portable kernels were faster with heads of up to {SLOW_HEADS} and long rows on one H200"


@cache
def triton_reason() -> str:
    """Return the reason why the installed Triton cannot be used; "" if it can."""
    try:
        text = version("triton")
    except PackageNotFoundError:
        return "Triton is not installed"
    numbers = tuple(int(part) for part in text.split(".")[:2])
    if TRITON_FROM <= numbers < TRITON_BELOW:
        return ""
    first, past = (".".join(map(str, v)) for v in (TRITON_FROM, TRITON_BELOW))
    return f"it needs a Triton from {first} and below {past}, not {text}"


@cache
def device_reason(device: str) -> str:
    """Return the reason why a device cannot run the kernel; "" if it can. "meta" is an sm_90 that is absent."""
    if device == "meta":
        return ""
    if torch.device(device).type != "cuda" or torch.version.hip is not None or not torch.cuda.is_available():
        return f"it runs on NVIDIA GPUs, not on {device}"
    major, minor = torch.cuda.get_device_capability(device)
    return "" if (major, minor) == (9, 0) else f"it runs on sm_90, not on sm_{major}{minor}"
