"""Define `HardwareSpec`, the speeds from which `cost` predicts the time of a plan. GB/s are 1e9 bytes per second."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields, replace
from functools import cache
from itertools import pairwise
from math import isfinite, log
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, get_args, get_origin, get_type_hints

from burst_portable.errors import InputError, shown
from burst_portable.planning.call import KernelTraits
from burst_portable.planning.plans import PassName
from burst_portable.utils.files import read_json
from burst_portable.utils.values import as_float


@dataclass(frozen=True, slots=True)
class Range:
    """Allowed values of a number in a file.

    Attributes:
        least: Smallest allowed value.
        most: Largest allowed value.
        or_zero: Whether 0 is allowed too.
    """

    least: float
    most: float
    or_zero: bool = False

    def contains(self, value: float) -> bool:
        """Return whether a number is within the bounds; False for nan."""
        return self.least <= value <= self.most or (self.or_zero and value == 0)

    def text(self, kind: type) -> str:
        """Return the allowed values as text."""
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


_SPEEDS = ("tflops", "intra_node_bandwidth", "inter_node_bandwidth")
_TIMES = ("message_latency", "launch_latency", "backward_launch_latency", "backward_tflops", "memory_bandwidth")
"""Numbers that may be 0: latencies, and rates for which 0 means another value."""
INTER_NODE_BANDWIDTH = 50.0
"""Default between nodes, in GB/s: a network card of 400 Gb/s for each rank."""


@dataclass(frozen=True, slots=True)
class HardwareSpec:
    """Speeds of one rank's device and of its links.

    Attributes:
        tflops: matrix TFLOP/s per rank in the forward pass.
        intra_node_bandwidth: GB/s per rank in each direction, used if there is no curve.
        message_latency: seconds per message.
        launch_latency: seconds per kernel launch in the forward pass.
        backward_tflops: matrix TFLOP/s per rank in the backward pass. 0: the same as `tflops`.
        backward_launch_latency: seconds per launch in the backward pass. 0: the same as `launch_latency`.
        p2p_bandwidth: the curve of messages between two ranks over the plain transport.
        peer_copy_bandwidth: the curve of the backend's own transport, for messages that go directly to the buffer in
            which they are used. Empty if the backend has none.
        all_to_all_bandwidth: the curve of messages to and from several ranks at once over the plain transport, by
            their total bytes.
        comm_slowdown: (forward, backward) fraction of a message's time by which it delays a concurrent kernel: 0 if
            the message uses nothing that kernels need, 1 if they take turns. For the plain transport.
        comm_slowdown_high_priority: the same for a transport with `high_priority`. None: the same as `comm_slowdown`.
        memory_bandwidth: GB/s at which blocks are packed, merged and added outside of kernels. 0: not counted.
        kernel: the traits of the local kernel. Four of them affect the predicted time (`COST_TRAITS`).
        multi_launch_efficiency: fraction of the backward rate that remains if a pass has several launches.
        long_kv_efficiency: (rows, fraction): fraction of the forward rate that remains if a rank holds at least this
            many keys.
        block: rows and columns that a kernel computes at once, including masked ones. 1: exact pairs count.
        source: origin of the numbers, for messages: "of an H100", "measured on ...".
        ranks_per_node: ranks per node, if there are several nodes. 0: one node.
        inter_node_bandwidth: GB/s per rank in each direction between nodes.
        inter_node_source: "measured" if `inter_node_bandwidth` was measured between nodes of `ranks_per_node` ranks,
            "given" if the caller named it, empty if unknown.

    Raises:
        InputError: A speed is not above 0, another number is negative, or a number is not finite.
    """

    tflops: Rate
    intra_node_bandwidth: Rate
    message_latency: Latency = 20e-6
    launch_latency: Latency = 10e-6
    backward_tflops: RateOrZero = 0.0
    backward_launch_latency: Latency = 0.0
    p2p_bandwidth: Curve = ()
    peer_copy_bandwidth: Curve = ()
    all_to_all_bandwidth: Curve = ()
    comm_slowdown: tuple[Share, Share] = (0.0, 0.0)
    comm_slowdown_high_priority: tuple[Share, Share] | None = None
    memory_bandwidth: RateOrZero = 0.0
    kernel: KernelTraits = KernelTraits()
    multi_launch_efficiency: Remaining = 1.0
    long_kv_efficiency: tuple[SizeOrZero, Remaining] = (0, 1.0)
    block: Size = 1
    source: str = ""
    ranks_per_node: SizeOrZero = 0
    inter_node_bandwidth: Rate = INTER_NODE_BANDWIDTH
    inter_node_source: str = ""

    def __post_init__(self) -> None:
        for name in _SPEEDS + _TIMES:
            number = as_float(value := getattr(self, name))
            is_speed = name in _SPEEDS
            if number is None or not isfinite(number) or number < 0 or (is_speed and number == 0):
                allowed = "a finite number above 0" if is_speed else "a finite number of at least 0"
                raise InputError(f"HardwareSpec: {name} cannot be used", got=shown(value), allowed=allowed)

    def with_nodes(self, ranks_per_node: int, inter_node_bandwidth: float | None = None) -> HardwareSpec:
        """Return the spec for nodes of `ranks_per_node` ranks (0: unchanged), with `inter_node_bandwidth` if given.

        `source` then also contains the size of the nodes that were measured, if it is another one.
        """
        spec = replace(self, ranks_per_node=ranks_per_node or self.ranks_per_node)
        if inter_node_bandwidth is not None:
            return replace(spec, inter_node_bandwidth=inter_node_bandwidth, inter_node_source="given")
        if self.inter_node_source == "measured" and spec.ranks_per_node != self.ranks_per_node:
            other = f", between nodes of {self.ranks_per_node} and not {spec.ranks_per_node}"
            return replace(spec, source=self.source + other)
        return spec

    @property
    def inter_node_origin(self) -> str:
        """Return the origin of `inter_node_bandwidth`: "measured", "given", "assumed", or "" if unknown."""
        return self.inter_node_source or ("assumed" if self.inter_node_bandwidth == INTER_NODE_BANDWIDTH else "")

    def between_nodes(self) -> str:
        """Return the speed between nodes and its origin: "assumed 50 GB/s between nodes of 8"."""
        speed = f"{self.inter_node_bandwidth:.4g} GB/s between nodes of {self.ranks_per_node}"
        return f"{self.inter_node_origin} {speed}".lstrip()

    def with_high_priority(self) -> HardwareSpec:
        """Return the spec for a transport with `high_priority`."""
        slowdown = self.comm_slowdown_high_priority
        return self if slowdown is None else replace(self, comm_slowdown=slowdown)

    def is_inter_node(self, rank: int, other: int) -> bool:
        """Return whether two ranks are on different nodes."""
        return self.ranks_per_node > 0 and rank // self.ranks_per_node != other // self.ranks_per_node

    def receives_at_once(self, direct: bool) -> bool:
        """Return whether messages from several ranks arrive at once; otherwise one after the other."""
        return bool(self.all_to_all_bandwidth) and not (direct and self.peer_copy_bandwidth)

    def transfer(
        self,
        size: float,
        messages: int = 1,
        *,
        direct: bool = False,
        is_inter_node: bool = False,
        at_once: bool = False,
    ) -> float:
        """Return the seconds of messages that are sent one after the other.

        Args:
            size: Bytes of all messages.
            messages: Number of messages.
            direct: Whether they use the backend's own transport, if it has one.
            is_inter_node: Whether they are sent between nodes.
            at_once: Whether they are sent to or from several ranks at once.
        """
        curve: Curve = ()
        if not is_inter_node:
            curve = (
                (direct and self.peer_copy_bandwidth) or (at_once and self.all_to_all_bandwidth) or self.p2p_bandwidth
            )
        if not curve:
            bandwidth = self.inter_node_bandwidth if is_inter_node else self.intra_node_bandwidth
            return self.message_latency * min(messages, 2) + size / (bandwidth * 1e9)
        return max(self.message_latency, size / (_bandwidth_at(curve, size / messages) * 1e9))

    def compute(self, flops: float, pass_name: PassName, calls: int = 1) -> float:
        """Return the seconds of one launch that makes `calls` calls of an operator."""
        if pass_name == "forward":
            return calls * self.launch_latency + flops / (self.tflops * 1e12)
        latency = self.backward_launch_latency or self.launch_latency
        return calls * latency + flops / ((self.backward_tflops or self.tflops) * 1e12)

    def read_and_write(self, size: int) -> float:
        """Return the seconds to read and write `size` bytes of memory in total."""
        return size / (self.memory_bandwidth * 1e9) if self.memory_bandwidth else 0.0


def _bandwidth_at(curve: Curve, size: float) -> float:
    """Return the GB/s at a size in bytes, interpolated linearly in the logarithm of the size."""
    (small, slow), *_ = curve
    if size <= small:
        return slow
    for (small, slow), (large, fast) in pairwise(curve):
        if size <= large:
            return slow + (fast - slow) * log(size / small) / log(large / small)
    return curve[-1][1]


SCHEMA = "burst_portable.hardware_spec/3"
NEXT_STEP = "`burst-portable measure --json FILE` writes one"
_LARGEST_FILE = 1 << 20
COST_TRAITS = ("splits_tiles", "single_pass_merge", "writes_gradients", "prefers_square")
"""Traits of a kernel that affect the predicted time of a plan. A file contains them."""
_WORDS = ("source", "inter_node_source")  # fields of `HardwareSpec` that are not in a file
_POINTS = 256  # of a curve
_LONGEST = 200  # characters of a name


@dataclass(frozen=True, slots=True)
class MeasuredHardware:
    """Contents of a hardware spec file.

    Attributes:
        hardware: The measured speeds. `source` names the device, the file and the date.
        device: Name of the device.
        ranks: Number of ranks that took part.
        kernel: Name of the local kernel.
        date: Date of the measurement, as 2026-11-22.
        dtype: Dtype of the measured attention; "" if the file does not contain it.
        head_dim: Size of a head of the measured attention; 0 if the file does not contain it.
    """

    hardware: HardwareSpec
    device: str
    ranks: int
    kernel: str
    date: str
    dtype: str = ""
    head_dim: int = 0

    def hardware_for(self, ranks: int, kernel: str = "", dtype: str = "", head_dim: int = 0) -> HardwareSpec:
        """Return the spec for a call. Its `source` lists what differs from the measurement.

        Args:
            ranks: Ranks of the call.
            kernel: Name of the local kernel. Default: unknown, not compared.
            dtype: Dtype of q, k and v. Default: unknown, not compared.
            head_dim: Size of a head. Default: unknown, not compared.
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
        return replace(self.hardware, source=", ".join([self.hardware.source, *other]))


def read_hardware_spec(file: str | Path) -> MeasuredHardware:
    """Read a hardware spec file.

    Raises:
        InputError: The file is missing, too large, not JSON or of another schema. Or a number is out of range, or a
            curve is not sorted by size.
    """
    if not str(file):
        raise InputError("no hardware spec file is named", got="an empty name", next_step=NEXT_STEP)
    data = read_json(Path(file), "a hardware spec file", _LARGEST_FILE, next_step=NEXT_STEP)
    found = data.get("schema") if isinstance(data, dict) else None
    if found != SCHEMA:
        raise InputError(
            f"{file} is not a hardware spec file", got=f"schema {shown(found)}", allowed=SCHEMA, next_step=NEXT_STEP
        )
    given = data.get("hardware")
    if not isinstance(given, dict):
        raise _wrong(file, "hardware", given, "an object of numbers")
    kinds = _kinds()
    if unknown := sorted(set(given) - set(kinds)):
        raise _wrong(file, "hardware", f"a field {shown(unknown[0])}", ", ".join(kinds))
    if missing := [
        field.name for field in fields(HardwareSpec) if field.default is MISSING and field.name not in given
    ]:
        raise _wrong(file, "hardware", f"no {missing[0]}", "with tflops and intra_node_bandwidth at least")
    device, kernel, date = (_name(file, data, name) for name in ("device", "kernel", "date"))
    ranks = data.get("ranks")
    if type(ranks) is not int or not 0 < ranks < 1 << 31:
        raise _wrong(file, "ranks", ranks, "an int of at least 1")
    dtype = _name(file, data, "dtype") if "dtype" in data else ""
    head_dim = _read(file, "head_dim", data["head_dim"], Size) if "head_dim" in data else 0
    made = {name: _read(file, f"hardware.{name}", value, kinds[name]) for name, value in given.items()}
    node = made.get("ranks_per_node", 0)
    inter_node_source = "measured" if node and "inter_node_bandwidth" in made else ""
    if node and ranks % node:
        raise _wrong(file, "hardware.ranks_per_node", node, f"0, or a divisor of the {ranks} ranks")
    source = f"measured on {device} ({file}, {date})"
    hardware = HardwareSpec(**made, source=source, inter_node_source=inter_node_source)
    return MeasuredHardware(hardware, device, ranks, kernel, date, dtype, head_dim)


def as_json(hardware: HardwareSpec) -> dict[str, Any]:
    """Return the fields of a spec as a file contains them."""
    values = {name: getattr(hardware, name) for name in _kinds()}
    return values | {"kernel": {name: getattr(hardware.kernel, name) for name in COST_TRAITS}}


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
    """Return the annotations of the fields of `HardwareSpec` that a file holds."""
    hints = get_type_hints(HardwareSpec, include_extras=True)
    return {field.name: hints[field.name] for field in fields(HardwareSpec) if field.name not in _WORDS}


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
    if not found or not range_.contains(value):
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
    if not isinstance(value, dict) or not set(value) <= set(COST_TRAITS):
        raise _wrong(file, name, shown(value), f"an object of {', '.join(COST_TRAITS)}")
    for trait, flag in value.items():
        if not isinstance(flag, bool):
            raise _wrong(file, f"{name}.{trait}", shown(flag), "true or false")
    return KernelTraits(**value)
