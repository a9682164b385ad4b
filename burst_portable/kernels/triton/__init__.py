"""The portable kernels, in plain Triton. Importing this package imports triton; nothing else in the library does."""

from burst_portable.kernels.triton.launch import TritonKernel

__all__ = ["TritonKernel"]
