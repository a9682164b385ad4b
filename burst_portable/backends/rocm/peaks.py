"""What AMD's data sheets say of its accelerators: dense TFLOP/s in 16 bits on matrix cores, and GB/s of memory.

By chip, compute units and name: an MI300X in partitions shows fewer units than the whole, and is then unknown. One die
of the two of an MI250X is a device of its own, so half of the card's figures are its.
"""

from __future__ import annotations

from burst_portable.backends.base import Peaks

# (chip, compute units, in the name): (TFLOP/s, GB/s, who says so). Compared, in November 2026, with public copies of
# these sheets, and with units x clock x FLOPs per clock: 1024 a unit for MI200, 2048 for MI300, 4096 for MI355X. Copies
# differ on MI350X, which is not here.
_MI200 = "AMD Instinct MI200 series data sheet"
_BY_DEVICE = {
    ("gfx90a", 110, "MI250X"): (191.5, 1638.4, _MI200),
    ("gfx90a", 104, "MI250"): (181.05, 1638.4, _MI200),
    ("gfx90a", 104, "MI210"): (181.0, 1638.4, _MI200),
    ("gfx942", 304, "MI300X"): (1307.4, 5300.0, "AMD Instinct MI300X data sheet"),
    ("gfx942", 304, "MI325X"): (1307.4, 6000.0, "AMD Instinct MI325X data sheet"),
    ("gfx950", 256, "MI355X"): (2516.6, 8000.0, "AMD Instinct MI355X data sheet"),
}
_DTYPES = ("bfloat16", "float16")


def peaks(name: str, chip: str, units: int, dtype: str) -> Peaks:
    """Of a device by what torch tells of it; unknown where the table has none."""
    found = [
        rates for (one, count, part), rates in _BY_DEVICE.items() if (one, count) == (chip, units) and part in name
    ]
    if not found:
        return Peaks(name, dtype, None, None, "this device is not in the table of data sheets")
    tflops, gbps, sheet = found[0]
    if dtype not in _DTYPES:
        return Peaks(name, dtype, None, gbps * 1e9, f"{sheet}; no peak is told for {dtype}")
    return Peaks(name, dtype, tflops * 1e12, gbps * 1e9, f"{sheet}, dense")
