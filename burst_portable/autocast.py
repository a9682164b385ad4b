"""Where torch's autocast ends: a call takes its tensors as scaled_dot_product_attention would, and keeps to them."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

_NOTHING = nullcontext()


def as_autocast_would(q: Tensor, k: Tensor, v: Tensor, device_type: str | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """In autocast's dtype where it is on for their device, or for the one that is meant; float64 is left alone."""
    if not torch._C._is_any_autocast_enabled():  # one quick question, where the answer is nearly always no
        return q, k, v
    if device_type is None:
        if not isinstance(q, Tensor):  # refused later, with all that is not a tensor
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
    """Autocast ends here: it would cut the products inside a kernel down to 16 bits."""
    if torch._C._is_any_autocast_enabled() and torch.is_autocast_enabled(device.type):
        return torch.autocast(device.type, enabled=False)
    return _NOTHING
