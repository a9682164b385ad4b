"""Replace the observer, the kernel or the transport in attention calls of a test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from burst_portable.comm.base import Transport
from burst_portable.kernels.base import Kernel
from burst_portable.runtime.prepared_call import Observer, PreparedCall, call_wrapper


@contextmanager
def calls_with(
    *,
    observer: Callable[[PreparedCall], Observer] | None = None,
    kernel: Callable[[Kernel], Kernel] | None = None,
    transport: Callable[[Transport], Transport] | None = None,
) -> Iterator[None]:
    """Replace parts of each call whose forward pass begins in this context.

    Each argument makes the new part from the old one.
    """

    def change(prepared: PreparedCall, _: object) -> PreparedCall:
        parts: dict[str, Any] = {}
        if observer is not None:
            parts["observer"] = observer(prepared)
        if kernel is not None:
            parts["kernel"] = kernel(prepared.kernel)
        if transport is not None:
            parts["transport"] = transport(prepared.transport)
        return replace(prepared, **parts)

    token = call_wrapper.set(change)
    try:
        yield
    finally:
        call_wrapper.reset(token)
