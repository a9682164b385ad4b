"""Make TMA descriptors of tensors and keep them, and check the strides that the kernels accept."""

from __future__ import annotations

from collections.abc import Hashable
from functools import partial
from typing import Any

from torch import Tensor

from burst_portable.backends.cuda.driver import Described, kernel_driver, pack_described
from burst_portable.errors import UnsupportedError
from burst_portable.kernels.base import align_rows
from burst_portable.kernels.triton.arguments import Address
from burst_portable.utils.cache import Cache

_DESCRIPTORS = 8192  # maximum number of descriptors that are kept; a layer uses 13 per head group


class Descriptors:
    """TMA descriptors by address, shape, strides and block. They are reused because the allocator reuses addresses."""

    def __init__(self) -> None:
        self._kept: Cache[Hashable, Described] = Cache(_DESCRIPTORS)
        self._units: Cache[Hashable, tuple[int, ...]] = Cache(_DESCRIPTORS)

    def rows(self, name: str, x: Tensor, rows: int, columns: int) -> Described:
        """Return the descriptor of x [B, S, H, D] for blocks of `rows` rows and `columns` columns of one head."""
        key = (x.data_ptr(), x.shape, x.stride(), x.dtype, rows, columns)
        found = self._kept.get(key)
        if found is None:
            swizzle = min(128, columns * x.element_size())
            found = self._keep(key, x, [1, rows, 1, columns], swizzle, tma_strides(name, x))
        return found

    def panels(self, name: str, x: Tensor, rows: int, panels: tuple[int, int]) -> tuple[Described, Described]:
        """Return the descriptors of both panels of a head. If there is only one panel, return its descriptor twice."""
        first = self.rows(name, x, rows, panels[0])
        return first, self.rows(name, x, rows, panels[1]) if panels[1] else first

    def aligned_panels(
        self, name: str, x: Tensor, rows: int, panels: tuple[int, int]
    ) -> tuple[Tensor, tuple[Described, Described]]:
        """Return `x`, or a copy if TMA does not accept its strides or address, and the descriptors of its panels."""
        first = self._kept.get((x.data_ptr(), x.shape, x.stride(), x.dtype, rows, panels[0]))
        if first is None:
            x = align_rows(x)
            first = self.rows(name, x, rows, panels[0])
        return x, (first, self.rows(name, x, rows, panels[1]) if panels[1] else first)

    def vector(self, x: Tensor, rows: int) -> Described:
        """Return the descriptor of a matrix x for blocks of `rows` consecutive entries of one of its rows."""
        key = (x.data_ptr(), x.shape, x.stride(), rows)
        return self._kept.get(key) or self._keep(key, x, [1, rows], 0, list(x.stride()))

    def strides(self, name: str, x: Tensor, unit: int) -> tuple[int, ...]:
        """Return the strides of batch row, row and head as in `tma_strides`, in units of `unit` elements."""
        key = (x.shape, x.stride(), x.dtype, x.data_ptr() % 16, unit)
        found = self._units.get(key)
        if found is None:
            found = self._units.keep(key, tuple(s // unit for s in tma_strides(name, x)[:3]))
        return found

    def _keep(self, key: Hashable, x: Tensor, block: list[int], swizzle: int, strides: list[int]) -> Described:
        shape = list(x.shape)
        # One TMA copy is at most as wide as a swizzled line.
        box = (*block[:-1], min(block[-1], swizzle // x.element_size()) if swizzle else block[-1])
        driver = None if x.is_meta else kernel_driver()
        packed = b""
        if driver is not None:
            encoded = driver.tensor_map(x.data_ptr(), x.dtype, shape, strides, box, swizzle)
            packed = pack_described(encoded, shape, strides)
        triton = partial(_triton_descriptor, Address(x), shape, strides, block, swizzle)
        return self._kept.keep(key, Described(triton, box, swizzle, packed))


def _triton_descriptor(x: Address, shape: list[int], strides: list[int], block: list[int], swizzle: int) -> Any:
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    bits = 8 * x.dtype.itemsize
    layout = gl.NVMMASharedLayout(swizzle_byte_width=swizzle, element_bitwidth=bits, rank=len(shape))
    return TensorDescriptor(x, shape, strides, block, layout)


def tma_strides(name: str, x: Tensor) -> list[int]:
    """Return the strides of x [B, S, H, D]. A dimension of size 1 gets a stride that TMA accepts.

    Raises:
        UnsupportedError: TMA does not accept the strides or the address of `x`.
    """
    each = 16 // x.element_size()
    strides = [each * x.shape[3] if n == 1 else s for n, s in zip(x.shape[:3], x.stride()[:3], strict=True)]
    if x.stride(3) != 1 or any(s % each or s <= 0 for s in strides) or x.data_ptr() % 16:
        raise UnsupportedError(
            f"the hopper kernel cannot address {name}",
            got=f"strides {x.stride()} at byte {x.data_ptr() % 16} of 16",
            allowed="last stride 1, others multiples of 16 bytes, begun at a multiple of 16 bytes",
            next_step="make it contiguous or use the triton kernel",
        )
    return [*strides, 1]


def check_last_stride(name: str, x: Tensor) -> None:
    """Raise `UnsupportedError` if the last dimension of x is not contiguous."""
    if x.stride(-1) != 1 and x.shape[-1] != 1:
        raise UnsupportedError(f"the last stride of {name} must be 1", got=x.stride(), next_step="make it contiguous")
