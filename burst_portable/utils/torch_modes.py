"""Where torch's autocast ends: tensors are cast as for scaled_dot_product_attention, and not again inside a call."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import wraps
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.utils import _python_dispatch as modes

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


P = ParamSpec("P")
T = TypeVar("T")


def outside_graphs(function: Callable[P, T], reason: str = "") -> Callable[P, T]:
    """A declared graph break: a compiled caller runs `function` uncompiled, between two graphs.

    Unlike `torch.compiler.disable`, decorating does not import the compiler; without one, a call costs one check.
    """
    told = reason or f"burst_portable runs {function.__name__} outside of graphs"

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        if torch.compiler.is_compiling():
            uncompiled: Callable[P, T] = torch.compiler.disable(function, reason=told)
            return uncompiled(*args, **kwargs)
        return function(*args, **kwargs)

    # What `torch.compiler.disable` sets: a compiler that may not break the graph (fullgraph=True) then reports this
    # reason, and not that it cannot trace `disable`.
    call.__dict__.update(_torchdynamo_disable=True, _torchdynamo_disable_msg=told)
    return call


def never_compiled(reason: str) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """`torch.compiler.disable` with types. Decorating imports the compiler, so only for modules that users import."""

    def mark(function: Callable[P, T]) -> Callable[P, T]:
        marked: Callable[P, T] = torch.compiler.disable(function, reason=reason)
        return marked

    return mark


def hidden_from_checkpoints() -> AbstractContextManager[object]:
    """Inside, no policy of torch.utils.checkpoint's create_selective_checkpoint_contexts is asked.

    Such a policy hands out what it saved in place of a repeated operator. Here that would be wrong: partial results are
    merged into the results of operators, and messages arrive in them. In a region with such a policy, other modes
    (FlopCounterMode) see no operators of attention either.
    """
    if not torch._C._len_torch_dispatch_stack() or not any(map(_selects, modes._get_current_dispatch_mode_stack())):
        return _NOTHING
    hidden: AbstractContextManager[object] = modes._disable_current_modes()
    return hidden


def _selects(mode: object) -> bool:
    # Imported here, since `import torch` alone does not load it; if one of its modes is active, it is loaded.
    from torch.utils.checkpoint import _CachedTorchDispatchMode, _CachingTorchDispatchMode

    return isinstance(mode, _CachedTorchDispatchMode | _CachingTorchDispatchMode)
