"""What NVIDIA's data sheets say of its GPUs: dense TFLOP/s in 16 bits on tensor cores, and GB/s of memory.

By the whole name that the driver has for a GPU: a card with another clock, or a slice of one (MIG), is not in the
table, and so unknown. Other dtypes are unknown too: float32 runs on tensor cores or beside them, as the kernel likes.
"""

from __future__ import annotations

from burst_portable.backends.base import Peaks

# Compared, in November 2026, with public copies of these sheets. Figures "with sparsity" are twice the dense ones. Not
# here for want of a copy, or because copies differ: H100 NVL, H200 NVL, GH200, GB200, B300.
_AMPERE = "NVIDIA A100 data sheet"
_HOPPER = "NVIDIA H100 architecture white paper"
_BY_NAME = {
    "NVIDIA A100-SXM4-40GB": (312.0, 1555.0, _AMPERE),
    "NVIDIA A100-PCIE-40GB": (312.0, 1555.0, _AMPERE),
    "NVIDIA A100-SXM4-80GB": (312.0, 2039.0, _AMPERE),
    "NVIDIA A100 80GB PCIe": (312.0, 1935.0, _AMPERE),
    "NVIDIA H100 80GB HBM3": (989.4, 3350.0, _HOPPER),
    "NVIDIA H100 PCIe": (756.0, 2000.0, _HOPPER),  # memory also in the product brief PB-11133: "greater than 2,000"
    "NVIDIA H200": (989.4, 4800.0, "NVIDIA H200 data sheet"),
    "NVIDIA B200": (2250.0, 8000.0, "NVIDIA Blackwell architecture brief"),  # HGX, 1,000 W; some tables say 7,700 GB/s
    "NVIDIA L40": (181.05, 864.0, "NVIDIA L40 data sheet"),
    "NVIDIA L40S": (362.05, 864.0, "NVIDIA L40S data sheet"),
}
_DTYPES = ("bfloat16", "float16")


def peaks(name: str, dtype: str) -> Peaks:
    """Of a GPU by its name; unknown where the table has none."""
    if name not in _BY_NAME:
        return Peaks(name, dtype, None, None, "this GPU is not in the table of data sheets")
    tflops, gbps, sheet = _BY_NAME[name]
    if dtype not in _DTYPES:
        return Peaks(name, dtype, None, gbps * 1e9, f"{sheet}; no peak is told for {dtype}")
    return Peaks(name, dtype, tflops * 1e12, gbps * 1e9, f"{sheet}, dense")
