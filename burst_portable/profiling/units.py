"""Nanoseconds, shares and rates as people read them."""

from __future__ import annotations


def time_text(nanoseconds: float) -> str:
    """1_234_567 -> "1.23 ms"."""
    for size, unit in ((1e9, "s"), (1e6, "ms"), (1e3, "µs")):
        if abs(nanoseconds) >= size * 0.9995:
            value = nanoseconds / size
            return f"{value:.{2 if abs(value) < 9.995 else 1 if abs(value) < 99.95 else 0}f} {unit}"
    return f"{nanoseconds:.0f} ns"


def percent(share: float) -> str:
    """0.1234 -> "12.3 %"."""
    return f"{100 * share:.1f} %"


def scaled(value: float, unit: str, base: float = 1000.0) -> str:
    """1.5e9, "B" -> "1.5 GB"."""
    for prefix in ("", "k", "M", "G", "T", "P"):
        if abs(value) < base or prefix == "P":
            return f"{value:.3g} {prefix}{unit}"
        value /= base
    raise AssertionError
