"""Where torch's autocast ends: tensors are cast as for scaled_dot_product_attention, and not again inside a call."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

_NOTHING = nullcontext()


def as_autocast_would(q: Tensor, k: Tensor, v: Tensor, device_type: str | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """The tensors in autocast's dtype if it is on for their device, or for `device_type`; float64 is left alone."""
    if not torch._C._is_any_autocast_enabled():  # a quick check that is nearly always false
        return q, k, v
    if device_type is None:
        if not isinstance(q, Tensor):  # refused later, like everything that is not a tensor
            return q, k, v
        device_type = q.device.type
    if not (torch.amp.is_autocast_available(device_type) and torch.is_autocast_enabled(device_type)):
        return q, k, v
    dtype = torch.get_autocast_dtype(device_type)
    return _cast(q, dtype), _cast(k, dtype), _cast(v, dtype)


def _cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    if not isinstance(x, Tensor) or not x.is_floating_point() or x.dtype is torch.float64:
        return x
    return x.to(dtype)


def own_precision(device: torch.device) -> AbstractContextManager[object]:
    """A context without autocast, which would round the products inside a kernel to 16 bits."""
    if torch._C._is_any_autocast_enabled() and torch.is_autocast_enabled(device.type):
        return torch.autocast(device.type, enabled=False)
    return _NOTHING
