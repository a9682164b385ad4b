"""Define `Launch`, a kernel that is prepared except for its tensors.

Triton binds, specializes and looks up the arguments of each call, which takes the host longer than a short kernel runs.
A `Launch` calls the compiled kernel directly. This is safe because its key contains all that Triton specializes on:
dtypes, sizes, strides, and whether addresses are multiples of 16.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import lru_cache
from typing import Any

import triton
from torch import Tensor
from triton.runtime.interpreter import InterpretedFunction
from triton.tools.tensor_descriptor import TensorDescriptor

from burst_portable.kernels.triton import forward
from burst_portable.kernels.triton.arguments import ALWAYS, Address, compiled_kernel, name_compile_errors
from burst_portable.kernels.triton.arguments import padded as padded
from burst_portable.kernels.triton.arguments import strides as strides
from burst_portable.utils.cache import Cache
from burst_portable.utils.torch_modes import on_device

TMA_BYTES = 16
"""Addresses and strides of a hardware descriptor are multiples of this number of bytes."""
_KEPT = 512  # descriptors; the caching allocator reuses addresses


class Launch:
    """One kernel with its sizes, its constants and its table.

    The parameters of `kernel` are tensors and numbers, then `sizes`, then compile-time constants. `constants` also has
    launch options. `what` is the target and the dtype, for errors. A descriptor's block has `columns` rows.
    """

    def __init__(
        self,
        kernel: Any,
        programs: int,
        table: Tensor | None,
        sizes: tuple[int, ...],
        constants: dict[str, Any],
        what: str,
        columns: int = 0,
    ) -> None:
        self.programs, self.table, self._kernel, self._what, self._columns = programs, table, kernel, what, columns
        self.tma = bool(constants.get("TMA"))
        self.tma_numbers = bool(constants.get("TMA_NUMBERS"))
        names = [name for name in kernel.arg_names if name in constants]
        self._tail = (*sizes, *(constants[name] for name in names))
        self._options = ALWAYS | {name: value for name, value in constants.items() if name not in names}
        self._compiled: Callable[..., object] | None = None
        self._descriptors: Cache[tuple[str, int], TensorDescriptor] = Cache(_KEPT)

    def __call__(self, *arguments: object) -> None:
        if self._compiled is not None:
            self._compiled(*arguments, *self._tail)
        elif interpreted():  # the interpreter has no launch options
            self._kernel[(self.programs,)](*arguments, *self._tail)
        else:
            self._compiled = self._first(arguments)

    def _first(self, arguments: tuple[object, ...]) -> Callable[..., object]:
        configuration = f"{self._tail}, {self._options}"
        step = "pass another tuning to TritonKernel, or name another kernel"
        every = (*arguments, *self._tail)
        compiled = compiled_kernel(self._kernel, every, self._options, self._what, configuration, step)
        if compiled is None:
            return _launch_nothing
        with name_compile_errors(self._kernel, self._what, configuration, step):  # compiles Triton's launcher
            ready: Callable[..., object] = compiled[(self.programs, 1, 1)]
            ready(*every)
        return ready

    def described(self, name: str, x: Tensor) -> TensorDescriptor:
        """Return a hardware descriptor of [B, S, H, D] or [B, H, S] for blocks of `columns` rows."""
        if interpreted():
            return _descriptor(x, x, self._columns)
        key = name, x.data_ptr()
        return self._descriptors.get(key) or self._descriptors.keep(key, _descriptor(x, Address(x), self._columns))


def _launch_nothing(*_: object) -> None:
    """Launch a kernel whose tensors have no memory."""


def _descriptor(x: Tensor, base: object, rows: int) -> TensorDescriptor:
    # The stride of a dimension of size 1 may be any legal number.
    strides = [TMA_BYTES if n == 1 else s for s, n in zip(x.stride(), x.shape, strict=True)]
    block = [1, rows, 1, padded(x.shape[-1])] if x.dim() == 4 else [1, 1, rows]
    return TensorDescriptor(base, list(x.shape), [*strides[:-1], 1], block)


def describable(x: Tensor) -> bool:
    """Return whether a hardware descriptor can describe it. Strides of dimensions of size 1 do not matter."""
    strides = [s for s, n in zip(x.stride()[:-1], x.shape[:-1], strict=True) if n > 1]
    aligned = all(s > 0 and s * x.itemsize % TMA_BYTES == 0 for s in strides)
    return aligned and x.data_ptr() % TMA_BYTES == 0 and x.stride(-1) == 1 and x.numel() > 0


def layout_of(x: Tensor) -> tuple[object, ...]:
    """Return the properties of a tensor on which a launch depends."""
    return x.shape, x.stride(), x.dtype, x.device, x.data_ptr() % TMA_BYTES


def number_strides(*tensors: Tensor) -> tuple[int, ...]:
    """Return the batch, head and row stride of each [B, H, S]."""
    return tuple(s for x in tensors for s in x.stride())


def on_device_of(x: Tensor) -> AbstractContextManager[object]:
    """Return a context that makes the tensor's device current, since Triton launches on the current device."""
    return on_device(x.device)


@lru_cache(maxsize=1)
def interpreted() -> bool:
    """Return whether Triton's interpreter was enabled before the kernels were imported."""
    return isinstance(forward.attend_kernel, InterpretedFunction)


@lru_cache(maxsize=1)
def architecture() -> str:
    """Return Triton's target as a key of the tuning tables. A process has one kind of accelerator."""
    if interpreted():
        return "interpreter"
    arch = triton.runtime.driver.active.get_current_target().arch
    return f"sm_{arch}" if isinstance(arch, int) else str(arch)
