"""Define the AMD backend: RCCL, the portable Triton kernels, torch's flash attention, AITER, amdsmi."""

from burst_portable.backends.rocm.backend import RocmBackend

backend = RocmBackend()
