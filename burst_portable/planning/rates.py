"""What a machine does, with which plans are priced: see `cost`. Bytes, seconds, GB/s of 1e9 bytes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields, replace
from functools import cache
from itertools import pairwise
from math import log
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, get_args, get_origin, get_type_hints

from burst_portable.errors import InputError, shown
from burst_portable.planning.call import KernelTraits
from burst_portable.planning.plans import PassName
from burst_portable.utils.files import read_json


@dataclass(frozen=True, slots=True)
class Range:
    """Bounds of a number of a file, beside its type.

    Attributes:
        least, most: the bounds, both allowed.
        or_zero: whether 0 is allowed besides.
    """

    least: float
    most: float
    or_zero: bool = False

    def holds(self, value: float) -> bool:
        """Return whether a number is within the bounds; False for nan."""
        return self.least <= value <= self.most or (self.or_zero and value == 0)

    def text(self, kind: type) -> str:
        """Return what is allowed, in words."""
        if kind is int:
            return f"an int from {self.least}, below 2**48"
        return f"{'0, or ' if self.or_zero else ''}a number from {self.least:g} to {self.most:g}"


_LARGEST = (1 << 48) - 1
Rate = Annotated[float, Range(1e-6, 1e6)]
"""TFLOP/s or GB/s: no machine is slower or faster."""
RateOrZero = Annotated[float, Range(1e-6, 1e6, or_zero=True)]
Latency = Annotated[float, Range(0.0, 100.0)]
"""Seconds."""
Share = Annotated[float, Range(0.0, 1.0)]
Remaining = Annotated[float, Range(0.01, 1.0)]
"""The share of a rate that remains."""
Size = Annotated[int, Range(1, _LARGEST)]
SizeOrZero = Annotated[int, Range(0, _LARGEST)]
Curve = tuple[tuple[Size, Rate], ...]
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
        comm_slowdown: (forward, backward) the share of a message's time by which it delays a kernel beside it: 0 if the
            message takes nothing that kernels need, 1 if they take turns. For the plain transport.
        comm_slowdown_high_priority: the same if its messages go first (`comm.base.Transport.high_priority`); None: as
            `comm_slowdown`.
        memory: GB/s at which blocks are packed, merged and added up outside of kernels; 0: that is not priced.
        multi_launch_efficiency: the share of the backward rate that remains if a pass has several launches.
        long_kv_efficiency: (rows, share): the share of the forward rate that remains if a rank holds at least this many
            keys.
        kernel: what the local kernel declares about itself; four of its traits are priced (`PRICED`).
        block: rows and columns that a kernel computes at once, including what a mask hides; 1: exact pairs count.
        source: where the numbers come from, in words after "rates": "of an H100", "measured on ...".
        node: ranks per node, where there are several nodes; 0: one node.
        outer_gbps: GB/s per rank in each direction between nodes: another link than the one inside.
        outer_source: "measured" where `outer_gbps` was measured, between nodes of `node` ranks; "given" where it was
            named beside numbers from elsewhere; empty where nobody said.
    """

    tflops: Rate
    gbps: Rate
    hop_latency: Latency = 20e-6
    launch_latency: Latency = 10e-6
    backward: RateOrZero = 0.0
    backward_launch_latency: Latency = 0.0
    link: Curve = ()
    direct: Curve = ()
    spread: Curve = ()
    comm_slowdown: tuple[Share, Share] = (0.0, 0.0)
    comm_slowdown_high_priority: tuple[Share, Share] | None = None
    memory: RateOrZero = 0.0
    kernel: KernelTraits = KernelTraits()
    multi_launch_efficiency: Remaining = 1.0
    long_kv_efficiency: tuple[SizeOrZero, Remaining] = (0, 1.0)
    block: Size = 1
    source: str = ""
    node: SizeOrZero = 0
    outer_gbps: Rate = OUTER_GBPS
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
        """Return the rates over a transport whose messages go first."""
        first = self.comm_slowdown_high_priority
        return self if first is None else replace(self, comm_slowdown=first)

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
PRICED = ("splits_tiles", "single_pass_merge", "writes_gradients", "prefers_square")
"""The traits of a kernel by which plans are priced, and which a file holds."""
_WORDS = ("source", "outer_source")  # of `Rates`, which no file holds
_POINTS = 256  # of a curve
_LONGEST = 200  # characters of a name


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
    kinds = _kinds()
    if unknown := sorted(set(given) - set(kinds)):
        raise _wrong(file, "rates", f"a field {shown(unknown[0])}", ", ".join(kinds))
    if missing := [field.name for field in fields(Rates) if field.default is MISSING and field.name not in given]:
        raise _wrong(file, "rates", f"no {missing[0]}", "with tflops and gbps at least")
    device, kernel, date = (_name(file, data, name) for name in ("device", "kernel", "date"))
    ranks = data.get("ranks")
    if type(ranks) is not int or not 0 < ranks < 1 << 31:
        raise _wrong(file, "ranks", ranks, "an int of at least 1")
    dtype = _name(file, data, "dtype") if "dtype" in data else ""
    head_dim = _read(file, "head_dim", data["head_dim"], Size) if "head_dim" in data else 0
    made = {name: _read(file, f"rates.{name}", value, kinds[name]) for name, value in given.items()}
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
    values = {name: getattr(rates, name) for name in _kinds()}
    return values | {"kernel": {name: getattr(rates.kernel, name) for name in PRICED}}


def _wrong(file: str | Path, name: str, got: object, allowed: str) -> InputError:
    got = got if isinstance(got, str) else shown(got)
    return InputError(f"{file}: {name} cannot be used", got=got, allowed=allowed, next_step=NEXT_STEP)


def _name(file: str | Path, data: Mapping[str, Any], name: str) -> str:
    value = data.get(name)
    if not isinstance(value, str) or not 0 < len(value) <= _LONGEST or not value.isprintable():
        raise _wrong(file, name, shown(value), f"1 to {_LONGEST} characters in a line")
    return value


@cache
def _kinds() -> dict[str, Any]:
    """Return the annotations of the fields of `Rates` that a file holds."""
    hints = get_type_hints(Rates, include_extras=True)
    return {field.name: hints[field.name] for field in fields(Rates) if field.name not in _WORDS}


def _read(file: str | Path, name: str, value: Any, kind: Any) -> Any:
    """Return a value of a file as `kind`, the annotation of a field; raise `InputError` if it is none."""
    kind, *bounds = get_args(kind) if get_origin(kind) is Annotated else (kind,)
    if get_origin(kind) is UnionType:  # with None
        return None if value is None else _read(file, name, value, get_args(kind)[0])
    if get_origin(kind) is tuple:
        return _read_tuple(file, name, value, get_args(kind))
    if kind is KernelTraits:
        return _read_traits(file, name, value)
    (range_,) = bounds
    found = type(value) is int if kind is int else isinstance(value, int | float) and not isinstance(value, bool)
    if not found or not range_.holds(value):
        raise _wrong(file, name, shown(value), range_.text(kind))
    return kind(value)


def _read_tuple(file: str | Path, name: str, value: Any, kinds: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return a pair of numbers, or a curve as pairs in ascending order of size."""
    curve = kinds[-1] is Ellipsis
    if not isinstance(value, list) or (len(value) > _POINTS if curve else len(value) != len(kinds)):
        allowed = f"up to {_POINTS} pairs of bytes and GB/s" if curve else "two numbers"
        raise _wrong(file, name, shown(value), allowed)
    kinds = kinds[:1] * len(value) if curve else kinds
    read = tuple(_read(file, f"{name}[{i}]", one, kind) for i, (one, kind) in enumerate(zip(value, kinds, strict=True)))
    if curve and (sizes := [size for size, _ in read]) != sorted(set(sizes)):
        raise _wrong(file, name, f"sizes {shown(sizes)}", "each size once, the smallest first")
    return read


def _read_traits(file: str | Path, name: str, value: Any) -> KernelTraits:
    """Return traits from an object of flags."""
    if not isinstance(value, dict) or not set(value) <= set(PRICED):
        raise _wrong(file, name, shown(value), f"an object of {', '.join(PRICED)}")
    for trait, flag in value.items():
        if not isinstance(flag, bool):
            raise _wrong(file, f"{name}.{trait}", shown(flag), "true or false")
    return KernelTraits(**value)
