"""The portable kernels, in plain Triton. `TritonKernel` imports triton; nothing else in the library does."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from burst_portable.kernels.triton.launch import TritonKernel as TritonKernel

__all__ = ["TritonKernel"]


def __getattr__(name: str) -> object:
    """Lazily: parts of this package serve vendors whose Triton is older than `launch` needs."""
    if name not in __all__:
        raise AttributeError(f"module 'burst_portable.kernels.triton' has no attribute {name!r}")
    from burst_portable.kernels.triton.launch import TritonKernel

    return TritonKernel
