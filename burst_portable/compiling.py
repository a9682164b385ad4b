"""Where torch.compile's graphs end: plans, transports and hooks are Python, and run as they are."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

import torch

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
