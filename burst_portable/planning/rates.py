"""What a machine does, with which plans are priced: see `cost`. Bytes, seconds, GB/s of 1e9 bytes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, fields, replace
from itertools import pairwise
from math import log
from pathlib import Path
from typing import Any

from burst_portable.errors import InputError, shown
from burst_portable.planning.plans import PassName
from burst_portable.utils.files import read_json

Curve = tuple[tuple[int, float], ...]
"""(bytes, GB/s) of messages back to back, smallest first; latencies are included."""


OUTER_GBPS = 50.0
"""Between nodes, unless something better is known: a network card of 400 Gb/s for each rank."""


@dataclass(frozen=True, slots=True)
class Rates:
    """What a machine does.

    Attributes:
        tflops, backward: matrix TFLOP/s per rank, forward and backward; 0 backward means the same.
        gbps: GB/s per rank in each direction, where there is no curve.
        hop_latency, launch_latency, backward_launch_latency: seconds; 0 backward means the same.
        link: the curve of messages between two ranks over the plain transport.
        direct: the curve of the backend's own transport, for messages that go straight to where they are used; empty
            if there is none.
        spread: the curve of messages to and from several ranks at once over the plain transport, by their total
            bytes.
        holds_up: (forward, backward) the share of a message's time by which it delays a kernel beside it: 0 if the
            message takes nothing that kernels need, 1 if they take turns. For the plain transport.
        holds_up_first: the same if its messages go first (`comm.base.Transport.high_priority`); None: no different.
        memory: GB/s at which blocks are packed, merged and added up outside of kernels; 0: that is not priced.
        backward_in_turn: the share of the backward rate that remains if a pass has several launches.
        long: (rows, share): the share of the forward rate that remains if a rank holds at least this many keys.
        in_pieces: whether the kernel calls an operator on pieces and merges their results.
        merged_once: whether it merges each of them in one pass over memory.
        writes_gradients: whether it writes dK and dV in 16 bits, not added up in float32, where one launch makes them.
        faster_squares: whether rows of head shards are put in natural order where that makes one box or causal square.
        block: rows and columns that a kernel computes at once, including what a mask hides; 1: exact pairs count.
        source: where the numbers come from, in words after "rates": "of an H100", "measured on ...".
        node: ranks per node, where there are several nodes; 0: one node.
        outer_gbps: GB/s per rank in each direction between nodes: another link than the one inside.
        outer_source: "measured" where `outer_gbps` was measured, between nodes of `node` ranks; "given" where it was
            named beside numbers from elsewhere; empty where nobody said.
    """

    tflops: float
    gbps: float
    hop_latency: float = 20e-6
    launch_latency: float = 10e-6
    backward: float = 0.0
    backward_launch_latency: float = 0.0
    link: Curve = ()
    direct: Curve = ()
    spread: Curve = ()
    holds_up: tuple[float, float] = (0.0, 0.0)
    holds_up_first: tuple[float, float] | None = None
    memory: float = 0.0
    in_pieces: bool = False
    merged_once: bool = False
    writes_gradients: bool = False
    faster_squares: bool = False
    backward_in_turn: float = 1.0
    long: tuple[int, float] = (0, 1.0)
    block: int = 1
    source: str = ""
    node: int = 0
    outer_gbps: float = OUTER_GBPS
    outer_source: str = ""

    def with_nodes(self, node: int, outer_gbps: float | None = None) -> Rates:
        """The rates over nodes of `node` ranks (0: no others than before), with `outer_gbps` between them where given.

        `source` then says if what is between nodes was measured between nodes of another size.
        """
        node = node or self.node
        if outer_gbps is not None:
            return replace(self, node=node, outer_gbps=outer_gbps, outer_source="given")
        other = self.outer_source == "measured" and node != self.node
        source = f"{self.source}, between nodes of {self.node} and not {node}" if other else self.source
        return replace(self, node=node, source=source)

    @property
    def outer_origin(self) -> str:
        """In a word, where `outer_gbps` comes from: "measured", "given", "assumed"; empty where nobody said."""
        return self.outer_source or ("assumed" if self.outer_gbps == OUTER_GBPS else "")

    def between_nodes(self) -> str:
        """What is between nodes, and where that comes from: "assumed 50 GB/s between nodes of 8"."""
        return f"{self.outer_origin} {self.outer_gbps:.4g} GB/s between nodes of {self.node}".lstrip()

    def where_messages_go_first(self) -> Rates:
        """The rates over a transport whose messages go first."""
        return self if self.holds_up_first is None else replace(self, holds_up=self.holds_up_first)

    def apart(self, rank: int, other: int) -> bool:
        """Whether two ranks are on different nodes."""
        return self.node > 0 and rank // self.node != other // self.node

    def spreads(self, direct: bool) -> bool:
        """Whether messages from several ranks arrive at once, not one after the other."""
        return bool(self.spread) and not (direct and self.direct)

    def transfer(
        self, size: float, messages: int = 1, *, direct: bool = False, outer: bool = False, spread: bool = False
    ) -> float:
        """Seconds of some messages, `size` bytes in all, one after the other.

        direct: on the backend's own transport, if there is one; outer: between nodes; spread: at once with others.
        """
        curve = () if outer else (direct and self.direct) or (spread and self.spread) or self.link
        if not curve:
            gbps = self.outer_gbps if outer else self.gbps
            return self.hop_latency * min(messages, 2) + size / (gbps * 1e9)
        return max(self.hop_latency, size / (_at(curve, size / messages) * 1e9))

    def compute(self, flops: float, pass_name: PassName, calls: int = 1) -> float:
        """Return the seconds of one launch that makes `calls` calls of an operator."""
        if pass_name == "forward":
            return calls * self.launch_latency + flops / (self.tflops * 1e12)
        latency = self.backward_launch_latency or self.launch_latency
        return calls * latency + flops / ((self.backward or self.tflops) * 1e12)

    def read_and_write(self, size: int) -> float:
        """Seconds to read and write `size` bytes of memory, in all."""
        return size / (self.memory * 1e9) if self.memory else 0.0


def _at(curve: Curve, size: float) -> float:
    """GB/s at a size in bytes: between two measured sizes, linear in the logarithm of the size."""
    (small, slow), *_ = curve
    if size <= small:
        return slow
    for (small, slow), (large, fast) in pairwise(curve):
        if size <= large:
            return slow + (fast - slow) * log(size / small) / log(large / small)
    return curve[-1][1]


SCHEMA = "burst_portable.rates/2"
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
        raise InputError("no file of rates is named", got="an empty name", next_step=NEXT_STEP)
    data = read_json(Path(file), "a file of rates", _LARGEST_FILE, next_step=NEXT_STEP)
    found = data.get("schema") if isinstance(data, dict) else None
    if found != SCHEMA:
        raise InputError(
            f"{file} is not a file of rates", got=f"schema {shown(found)}", allowed=SCHEMA, next_step=NEXT_STEP
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
    return InputError(f"{file}: {name} cannot be used", got=got, allowed=allowed, next_step=NEXT_STEP)


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
    "backward_in_turn": _KEPT,
    "long": _pair(_whole(0), _KEPT),
    "block": _whole(1),
    "node": _whole(0),
}
