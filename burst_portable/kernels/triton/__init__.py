"""The portable kernels, in plain Triton. Nothing is imported here: `launch.TritonKernel` imports triton."""
