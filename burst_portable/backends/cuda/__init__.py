"""Define the NVIDIA backend: NCCL, peer copies, our kernels (Gluon on Hopper, portable Triton elsewhere), NVML."""

from burst_portable.backends.cuda.backend import CudaBackend

backend = CudaBackend()
