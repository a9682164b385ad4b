"""Numbers as people read them."""

from __future__ import annotations

_BYTES = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_FLOPS = ("FLOP", "kFLOP", "MFLOP", "GFLOP", "TFLOP", "PFLOP", "EFLOP")
_SECONDS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"), (1e-9, "ns"))


def bytes_text(size: float) -> str:
    """1536 -> "1.5 KiB"."""
    return _scaled(size, 1024.0, _BYTES)


def flops_text(count: float) -> str:
    """2e12 -> "2 TFLOP"."""
    return _scaled(count, 1000.0, _FLOPS)


def seconds_text(seconds: float) -> str:
    """0.0042 -> "4.2 ms"."""
    for unit, name in _SECONDS:
        if seconds >= unit:
            return f"{_short(seconds / unit)} {name}"
    return "0 s"


def percent(share: float) -> str:
    """0.1234 -> "12.3 %"."""
    return f"{100 * share:.1f} %"


def _scaled(value: float, base: float, names: tuple[str, ...]) -> str:
    index = 0
    while value >= base and index < len(names) - 1:
        value, index = value / base, index + 1
    return f"{_short(value)} {names[index]}"


def _short(value: float) -> str:
    """Three digits, and none that say nothing: 1.50 -> 1.5, 512.00 -> 512."""
    digits = 0 if value >= 100 else 1 if value >= 10 else 2
    text = f"{value:.{digits}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text
