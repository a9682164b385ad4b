"""Format numbers for people: sizes in powers of 1024, FLOPs and rates in powers of 1000."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Mapping, Sequence

_BYTES = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_PREFIXES = ("", "k", "M", "G", "T", "P", "E")
_SECONDS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"), (1e-9, "ns"))
_RANKS = 8  # largest number of listed ranks
_ROUNDS_UP = 0.9995  # of a unit: printed as 1 of it, not as 1000 of the smaller one


def bytes_text(size: float) -> str:
    """Format a number of bytes: 1536 -> "1.5 KiB"."""
    return _scaled(size, 1024.0, _BYTES)


def scaled(value: float, unit: str) -> str:
    """Format a value with a unit: 1.5e9, "B/s" -> "1.5 GB/s"."""
    return _scaled(value, 1000.0, tuple(prefix + unit for prefix in _PREFIXES))


def seconds_text(seconds: float) -> str:
    """Format seconds: 0.0042 -> "4.2 ms"."""
    for unit, name in _SECONDS:
        if seconds >= unit * _ROUNDS_UP:
            return f"{_short(seconds / unit)} {name}"
    return "0 s"


def by_time(seconds: Mapping[str, float]) -> str:
    """List names with their seconds, fastest first: {"a": 2.0, "b": 0.0042} -> "b 4.2 ms, a 2 s"."""
    return ", ".join(f"{name} {seconds_text(seconds[name])}" for name in sorted(seconds, key=seconds.__getitem__))


def time_text(nanoseconds: float) -> str:
    """Format nanoseconds with three digits, for columns of measured times: 1_230_000 -> "1.23 ms"."""
    for unit, name in _SECONDS[:-1]:
        value = nanoseconds * 1e-9 / unit
        if abs(value) >= _ROUNDS_UP:
            return f"{value:.{2 if abs(value) < 9.995 else 1 if abs(value) < 99.95 else 0}f} {name}"
    return f"{nanoseconds:.0f} ns"


def split_list(text: str, separator: str = ",") -> list[str]:
    """Split a list whose parts may have separators in parentheses: "a(x=1, y=2),b" -> ["a(x=1, y=2)", "b"]."""
    return re.split(rf"{re.escape(separator)}(?![^()]*\))", text)


def percent(share: float) -> str:
    """Format a share: 0.1234 -> "12.3 %"."""
    return f"{100 * share:.1f} %"


def rank_names(ranks: Sequence[int]) -> str:
    """Format rank numbers, the first few of many: [3] -> "rank 3", [0, 1] -> "ranks 0, 1"."""
    more = ", ..." if len(ranks) > _RANKS else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks[:_RANKS]))}{more}"


def _scaled(value: float, base: float, names: tuple[str, ...]) -> str:
    index = 0
    while abs(value) >= base * _ROUNDS_UP and index < len(names) - 1:
        value, index = value / base, index + 1
    return f"{_short(value)} {names[index]}"


def _short(value: float) -> str:
    """Format a number with three digits, without trailing zeros: 1.50 -> 1.5, 512.00 -> 512."""
    size = abs(value)
    if size < 1:
        return f"{value:.3g}"
    text = f"{value:.{0 if size >= 99.95 else 1 if size >= 9.995 else 2}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def beside(label: str, text: str, width: int | None) -> str:
    """Wrap `text` to lines that start after a label, so that label and text have `width` characters.

    The label is not part of the result. Words longer than a line, such as paths, are not split, so that they can be
    copied. With width None, the text stays one line, as for a log.
    """
    if width is None:
        return text
    lines = textwrap.wrap(text, max(1, width - len(label)), break_long_words=False, break_on_hyphens=False)
    return f"\n{'':{len(label)}}".join(lines)
