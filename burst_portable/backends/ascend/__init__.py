"""Define the Ascend backend: torch_npu, HCCL, the fused attention operator of CANN, triton-ascend."""

from burst_portable.backends.ascend.backend import AscendBackend

backend = AscendBackend()
