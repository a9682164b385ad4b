"""What AMD's data sheets say of its accelerators: dense TFLOP/s in 16 bits on matrix cores, and GB/s of memory.

By chip, compute units and name: an MI300X in partitions shows fewer units than the whole, and is then unknown. One die
of the two of an MI250X is a device of its own, so half of the card's figures are its.
"""

from __future__ import annotations

from burst_portable.backends.base import Peaks

# (chip, compute units, in the name): (TFLOP/s, GB/s).
_BY_DEVICE = {
    ("gfx90a", 110, "MI250X"): (191.5, 1638.4),
    ("gfx90a", 104, "MI210"): (181.0, 1638.4),
    ("gfx942", 304, "MI300X"): (1307.4, 5300.0),
    ("gfx942", 304, "MI325X"): (1307.4, 6000.0),
}
_DTYPES = ("bfloat16", "float16")


def peaks(name: str, chip: str, units: int, dtype: str) -> Peaks:
    """Of a device by what torch tells of it; unknown where the table has none."""
    found = [
        rates for (one, count, part), rates in _BY_DEVICE.items() if (one, count) == (chip, units) and part in name
    ]
    if not found:
        return Peaks(name, dtype, None, None, "this device is not in the table of data sheets")
    tflops, gbps = found[0]
    if dtype not in _DTYPES:
        return Peaks(name, dtype, None, gbps * 1e9, f"AMD's data sheet; no peak is told for {dtype}")
    return Peaks(name, dtype, tflops * 1e12, gbps * 1e9, "AMD's data sheet, dense")
