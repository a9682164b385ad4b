"""NVIDIA: NCCL, kernels of our own (Gluon on Hopper, portable Triton everywhere), NVML."""

from burst_portable.backends.cuda.backend import CudaBackend

backend = CudaBackend()
