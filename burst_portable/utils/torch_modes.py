"""Handle torch's modes: autocast, compilation and selective checkpointing."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch._C._functorch import unwrap_if_dead
from torch.utils import _python_dispatch as modes

_NOTHING = nullcontext()


def cast_for_autocast(q: Tensor, k: Tensor, v: Tensor, device_type: str | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Cast tensors to autocast's dtype if it is enabled for their device, or for `device_type`. Keep float64."""
    if not torch._C._is_any_autocast_enabled():  # a quick check that is almost always false
        return q, k, v
    if device_type is None:
        if not isinstance(q, Tensor):  # raises an error later
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


def on_device(device: torch.device) -> AbstractContextManager[object]:
    """Return a context that makes `device` current. Triton launches there, and transports connect there."""
    if device.index is None or device.index == torch.accelerator.current_device_index():
        return _NOTHING
    return torch.accelerator.device_index(device.index)


def disable_autocast(device: torch.device) -> AbstractContextManager[object]:
    """Return a context without autocast, which would round the products inside a kernel to 16 bits."""
    if torch._C._is_any_autocast_enabled() and torch.is_autocast_enabled(device.type):
        return torch.autocast(device.type, enabled=False)
    return _NOTHING


def disable_caller_modes(device: torch.device) -> AbstractContextManager[object]:
    """Return a context without autocast and without policies of checkpoints, in which a forward pass runs."""
    if not torch._C._is_any_autocast_enabled() and not torch._C._len_torch_dispatch_stack():
        return _NOTHING
    contexts = ExitStack()
    contexts.enter_context(disable_autocast(device))
    contexts.enter_context(disable_selective_checkpointing())
    return contexts


def apply_untransformed(function: type[torch.autograd.Function], *args: Any) -> Any:
    """Return `function.apply(*args)`, without what torch does before for transforms of torch.func.

    The caller has checked that none is active (`torch._C._are_functorch_transforms_active`), and `function` has no
    `setup_context`. `apply` then only unwraps tensors that have left a transform. It takes 1.8 us more than this one.
    """
    args = tuple([unwrap_if_dead(x) if isinstance(x, Tensor) else x for x in args])
    return super(torch.autograd.Function, function).apply(*args)  # type: ignore[misc]  # the part in C++


def is_capturing(device: torch.device) -> bool:
    """Return whether work on a device is being captured into a graph. The host cannot wait for it then."""
    captures = getattr(torch.get_device_module(device), "is_current_stream_capturing", None)
    return bool(captures and captures())


P = ParamSpec("P")
T = TypeVar("T")


def outside_graphs(function: Callable[P, T], reason: str = "") -> Callable[P, T]:
    """Declare a graph break: a compiled caller runs `function` uncompiled, between two graphs.

    Unlike `torch.compiler.disable`, decorating does not import the compiler. An uncompiled call costs one check.
    """
    reason = reason or f"burst_portable runs {function.__name__} outside of graphs"

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        if torch.compiler.is_compiling():
            uncompiled: Callable[P, T] = torch.compiler.disable(function, reason=reason)
            return uncompiled(*args, **kwargs)
        return function(*args, **kwargs)

    # `torch.compiler.disable` sets these too. With fullgraph=True, the compiler then reports this reason, and not that
    # it cannot trace `disable`.
    call.__dict__.update(_torchdynamo_disable=True, _torchdynamo_disable_msg=reason)
    return call


def never_compiled(reason: str) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Apply `torch.compiler.disable`, with types. This imports the compiler: only for modules that users import."""

    def mark(function: Callable[P, T]) -> Callable[P, T]:
        marked: Callable[P, T] = torch.compiler.disable(function, reason=reason)
        return marked

    return mark


def disable_selective_checkpointing() -> AbstractContextManager[object]:
    """Return a context in which policies of create_selective_checkpoint_contexts (torch.utils.checkpoint) do not apply.

    Such a policy returns a saved result instead of repeating an operator. Here this would be wrong: partial results are
    merged into the results of operators, and messages arrive in them. In a region with such a policy, other modes
    (FlopCounterMode) record no operators of attention either.
    """
    if not torch._C._len_torch_dispatch_stack() or not any(map(_selects, modes._get_current_dispatch_mode_stack())):
        return _NOTHING
    hidden: AbstractContextManager[object] = modes._disable_current_modes()
    return hidden


def disable_modes() -> AbstractContextManager[object]:
    """Return a context without dispatch modes, such as counters of FLOPs, which would record its operators."""
    if not torch._C._len_torch_dispatch_stack():
        return _NOTHING
    hidden: AbstractContextManager[object] = modes._disable_current_modes()
    return hidden


def _selects(mode: object) -> bool:
    # Imported here, since `import torch` alone does not load it; if one of its modes is active, it is loaded.
    from torch.utils.checkpoint import _CachedTorchDispatchMode, _CachingTorchDispatchMode

    return isinstance(mode, _CachedTorchDispatchMode | _CachingTorchDispatchMode)
