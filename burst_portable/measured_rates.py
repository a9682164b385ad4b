"""Files of rates that `burst-portable measure` wrote: read and checked, for `auto` to choose with.

A file is JSON: `schema`, the `rates` (fields of `rates.Rates`; those that are left out keep their defaults), and where
they come from: `device`, `ranks`, `kernel`, `date`, and `dtype` and `head_dim`, which early files lack. Everything else
in it is for people.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, fields, replace
from pathlib import Path
from typing import Any

from burst_portable.errors import InputError, explain, shown
from burst_portable.files import read_json
from burst_portable.rates import Curve, Rates

SCHEMA = "burst_portable.rates/1"
NEXT_STEP = "`burst-portable measure --json FILE` writes one"
_LARGEST_FILE = 1 << 20
_WORDS = ("source", "outer_source")  # of `Rates`, which no file holds
_POINTS = 256  # of a curve
_LONGEST = 200  # characters of a name
_LEAST, _MOST = 1e-6, 1e6  # TFLOP/s and GB/s: no machine is slower or faster
_SLOWEST = 100.0  # seconds of a latency


@dataclass(frozen=True, slots=True)
class MeasuredRates:
    """What a file holds.

    Attributes:
        rates: their `source` says where they come from.
        device: the name of the device on which they were measured.
        ranks, kernel: how many ranks took part, and their local kernel.
        date: when, as 2026-11-22.
        dtype, head_dim: of the attention that was measured ("", 0: the file does not say).
    """

    rates: Rates
    device: str
    ranks: int
    kernel: str
    date: str
    dtype: str = ""
    head_dim: int = 0

    def rates_for(self, ranks: int, kernel: str = "", dtype: str = "", head_dim: int = 0) -> Rates:
        """The rates for a call over `ranks` ranks; `source` says what differs from what was measured.

        Kernel, dtype and head size ("", 0: not known) are compared if both the call and the file have them.
        """
        other = []
        if kernel and kernel != self.kernel:
            other.append(f"with the kernel {self.kernel} and not {kernel}")
        if dtype and self.dtype and dtype != self.dtype:
            other.append(f"of {self.dtype} and not {dtype}")
        if head_dim and self.head_dim and head_dim != self.head_dim:
            other.append(f"with heads of {self.head_dim} and not {head_dim}")
        if ranks != self.ranks:
            other.append(f"on {self.ranks} rank{'' if self.ranks == 1 else 's'} and not {ranks}")
        return replace(self.rates, source=", ".join([self.rates.source, *other]))


def read_rates(file: str | Path) -> MeasuredRates:
    """The rates of a file.

    Raises `InputError` for a file that is missing, too large, not JSON or of another schema, and for numbers that no
    machine has: not finite, not positive, or in curves that are not sorted by size.
    """
    if not str(file):
        raise InputError(explain("no file of rates is named", got="an empty name", next_step=NEXT_STEP))
    data = read_json(Path(file), "a file of rates", _LARGEST_FILE, next_step=NEXT_STEP)
    found = data.get("schema") if isinstance(data, dict) else None
    if found != SCHEMA:
        raise InputError(
            explain(f"{file} is not a file of rates", got=f"schema {shown(found)}", allowed=SCHEMA, next_step=NEXT_STEP)
        )
    given = data.get("rates")
    if not isinstance(given, dict):
        raise _wrong(file, "rates", given, "an object of numbers")
    known = {field.name: field.default is MISSING for field in fields(Rates) if field.name not in _WORDS}
    if unknown := sorted(set(given) - set(known)):
        raise _wrong(file, "rates", f"a field {shown(unknown[0])}", ", ".join(known))
    if missing := [name for name, needed in known.items() if needed and name not in given]:
        raise _wrong(file, "rates", f"no {missing[0]}", "with tflops and gbps at least")
    device, kernel, date = (_name(file, data, name) for name in ("device", "kernel", "date"))
    ranks = data.get("ranks")
    if type(ranks) is not int or not 0 < ranks < 1 << 31:
        raise _wrong(file, "ranks", ranks, "an int of at least 1")
    dtype = _name(file, data, "dtype") if "dtype" in data else ""
    head_dim = _whole(1)(file, "head_dim", data["head_dim"]) if "head_dim" in data else 0
    made = {name: _CHECKS[name](file, f"rates.{name}", value) for name, value in given.items()}
    node = made.get("node", 0)
    outer_source = "measured" if node and "outer_gbps" in made else ""
    if node and ranks % node:
        raise _wrong(file, "rates.node", node, f"0, or a divisor of the {ranks} ranks")
    source = f"measured on {device} ({file}, {date})"
    return MeasuredRates(
        Rates(**made, source=source, outer_source=outer_source), device, ranks, kernel, date, dtype, head_dim
    )


def as_json(rates: Rates) -> dict[str, Any]:
    """The fields of rates as a file holds them."""
    return {field.name: getattr(rates, field.name) for field in fields(Rates) if field.name not in _WORDS}


def _wrong(file: str | Path, name: str, got: object, allowed: str) -> InputError:
    got = got if isinstance(got, str) else shown(got)
    return InputError(explain(f"{file}: {name} cannot be used", got=got, allowed=allowed, next_step=NEXT_STEP))


def _name(file: str | Path, data: Mapping[str, Any], name: str) -> str:
    value = data.get(name)
    if not isinstance(value, str) or not 0 < len(value) <= _LONGEST or not value.isprintable():
        raise _wrong(file, name, shown(value), f"1 to {_LONGEST} characters in a line")
    return value


_Check = Callable[[str | Path, str, Any], Any]


def _number(least: float, most: float, *, or_zero: bool = False) -> _Check:
    """A check for a number in a range."""
    allowed = f"{'0, or ' if or_zero else ''}a number from {least:g} to {most:g}"

    def check(file: str | Path, name: str, value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise _wrong(file, name, shown(value), allowed)
        if not (least <= value <= most or (or_zero and value == 0)):  # written so that nan is refused as well
            raise _wrong(file, name, shown(value), allowed)
        return float(value)

    return check


def _whole(least: int) -> _Check:
    def check(file: str | Path, name: str, value: Any) -> int:
        if type(value) is not int or not least <= value < 1 << 48:
            raise _wrong(file, name, shown(value), f"an int from {least}, below 2**48")
        return value

    return check


def _flag(file: str | Path, name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise _wrong(file, name, shown(value), "true or false")
    return value


def _pair(first: _Check, second: _Check) -> _Check:
    def check(file: str | Path, name: str, value: Any) -> tuple[Any, Any]:
        if not isinstance(value, list) or len(value) != 2:
            raise _wrong(file, name, shown(value), "two numbers")
        return first(file, f"{name}[0]", value[0]), second(file, f"{name}[1]", value[1])

    return check


def _or_none(check: _Check) -> _Check:
    return lambda file, name, value: None if value is None else check(file, name, value)


def _curve(file: str | Path, name: str, value: Any) -> Curve:
    if not isinstance(value, list) or len(value) > _POINTS:
        raise _wrong(file, name, shown(value), f"up to {_POINTS} pairs of bytes and GB/s")
    point = _pair(_whole(1), _RATE)
    points = tuple(point(file, f"{name}[{i}]", one) for i, one in enumerate(value))
    sizes = [size for size, _ in points]
    if sizes != sorted(set(sizes)):
        raise _wrong(file, name, f"sizes {shown(sizes)}", "each size once, the smallest first")
    return points


_RATE, _LATENCY, _SHARE = _number(_LEAST, _MOST), _number(0.0, _SLOWEST), _number(0.0, 1.0)
_KEPT = _number(0.01, 1.0)
_CHECKS: dict[str, _Check] = {
    "tflops": _RATE,
    "backward": _number(_LEAST, _MOST, or_zero=True),
    "gbps": _RATE,
    "outer_gbps": _RATE,
    "memory": _number(_LEAST, _MOST, or_zero=True),
    "hop_latency": _LATENCY,
    "launch_latency": _LATENCY,
    "backward_launch_latency": _LATENCY,
    "link": _curve,
    "direct": _curve,
    "spread": _curve,
    "holds_up": _pair(_SHARE, _SHARE),
    "holds_up_first": _or_none(_pair(_SHARE, _SHARE)),
    "in_pieces": _flag,
    "merged_once": _flag,
    "writes_gradients": _flag,
    "faster_squares": _flag,
    "backward_together": _KEPT,
    "backward_in_turn": _KEPT,
    "far": _pair(_whole(0), _KEPT),
    "long": _pair(_whole(0), _KEPT),
    "block": _whole(1),
    "node": _whole(0),
}
