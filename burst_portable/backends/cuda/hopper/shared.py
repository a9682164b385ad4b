"""Shared memory and TMA by names that all versions of Gluon understand: its Python renames, its compiler does not."""

from triton._C.libtriton import ir
from triton.experimental.gluon.language._core import _unwrap_if_constexpr, builtin
from triton.experimental.gluon.language.nvidia.hopper import tma

# From Triton 3.8 on, and before.
tma_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
tma_store = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global


@builtin
def tma_add(desc, coord, src, _semantic=None):
    """Add a buffer to global memory: `tma.async_atomic_add` from Triton 3.8 on, and no name before."""
    coord = _semantic._convert_to_ir_values(coord, require_i64=False)
    _semantic.builder.create_async_tma_reduce(ir.DESCRIPTOR_REDUCE_KIND.ADD, desc.handle, coord, src.handle)


@builtin
def seen_as(buffer, dtype, shape, layout, _semantic=None):
    """The same bytes as another dtype, shape and layout: `reinterpret` from Triton 3.9 on, `_reinterpret` before."""
    shape = [_unwrap_if_constexpr(size) for size in _unwrap_if_constexpr(shape)]
    return _semantic.memdesc_reinterpret(buffer, _unwrap_if_constexpr(dtype), shape, _unwrap_if_constexpr(layout))
