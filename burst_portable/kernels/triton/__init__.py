"""Define the portable kernels in Triton. This file imports nothing; `triton_kernel.TritonKernel` imports triton."""
