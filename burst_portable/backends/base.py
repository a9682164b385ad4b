"""Define `Backend`, the contract between a vendor's device, kernels and transports and all other code.

Code outside a vendor's folder queries capabilities, never a vendor's name.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cached_property
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Protocol

import torch

from burst_portable.comm.base import Transport
from burst_portable.comm.torch_dist import TorchDistTransport
from burst_portable.errors import BackendUnavailableError, UnsupportedError, format_error, in_a_line
from burst_portable.kernels.base import Kernel, LazyKernel
from burst_portable.planning.hardware import Curve as Curve
from burst_portable.planning.hardware import HardwareSpec as HardwareSpec
from burst_portable.planning.hardware import MeasuredHardware as MeasuredHardware


@dataclass(frozen=True, slots=True)
class Capabilities:
    """Frozen facts about a backend.

    Attributes:
        device_type: the torch device type of its tensors.
        process_group: the torch.distributed backend of process groups; "gloo" if `transport` does not need them.
        streams: whether work is asynchronous and ordered by streams.
        hardware: rates for predictions if nothing was measured.
        direct_transport: name of the backend's transport for plans whose messages go directly to the rank that uses
            them (`Plan.direct`); empty if it has none.
    """

    device_type: str
    process_group: str
    streams: bool
    hardware: HardwareSpec
    direct_transport: str = ""


@dataclass(frozen=True, slots=True)
class Probe:
    """Result of a probe: whether a backend can run on this machine, the reason if not, and facts."""

    ok: bool
    reason: str = ""
    facts: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Peaks:
    """Peak rates of a device: the roofline with which profiles are compared. Unknown rates are None.

    Attributes:
        device: name of the device.
        dtype: dtype of `flops`, torch's name without "torch.".
        flops: peak FLOP/s of dense matrix products in that dtype, accumulated at least in float32.
        bandwidth: bytes/s of its memory, reads and writes together.
        source: source of the numbers, as text, or why they are unknown.
        measured: whether they were measured on this machine. False: the vendor states them.
    """

    device: str
    dtype: str
    flops: float | None
    bandwidth: float | None
    source: str
    measured: bool = False


def sheet_peaks(device: str, dtype: str, sheet: tuple[float, float, str] | None) -> Peaks:
    """Return the peaks of a device by its data sheet: TFLOP/s in 16 bits, GB/s, name. None: there is no sheet."""
    if sheet is None:
        return Peaks(device, dtype, None, None, "this device is not in the table of data sheets")
    tflops, bandwidth, source = sheet
    if dtype not in ("bfloat16", "float16"):
        return Peaks(device, dtype, None, bandwidth * 1e9, f"{source}; no peak is stated for {dtype}")
    return Peaks(device, dtype, tflops * 1e12, bandwidth * 1e9, f"{source}, dense")


class Meter(Protocol):
    """Sensors of one device. A read takes at most one or two milliseconds of the host, and no time of the device."""

    def read(self) -> dict[str, float]:
        """Return the available readings.

        Keys: "watts", "megahertz" of the compute clock, "celsius", and "joules" since a fixed time in the past.
        """

    def close(self) -> None:
        """Release the sensors."""


class SensorMeter:
    """A meter of named sensors. A reading lacks those that raise an error of `absent`."""

    def __init__(
        self, sensors: Mapping[str, Callable[[], float]], absent: tuple[type[Exception], ...], close: Callable[[], None]
    ) -> None:
        self._sensors, self._absent, self.close = sensors, absent, close

    def read(self) -> dict[str, float]:
        found = {}
        for name, sensor in self._sensors.items():
            with suppress(*self._absent):
                found[name] = float(sensor())
        return found


class LinkCounters(Protocol):
    """Counters of one device for the bytes on its links to other devices of its kind."""

    def read(self) -> tuple[int, int]:
        """Return (sent, received) bytes since a fixed time in the past.

        Counts messages and all other writes and reads over a link, without the overhead of the link's protocol. Active
        transfers may be counted in part. Raises `BackendUnavailableError` if the counters can no longer be read.
        """

    def close(self) -> None:
        """Release the counters."""


class Tracer(Protocol):
    """A vendor's tracer of this process. Its annotations are those of `torch.profiler.record_function`."""

    def start(self) -> None:
        """Start tracing. Raises `UnsupportedError` if that is not possible."""

    def stop(self) -> bytes:
        """Stop tracing and return the tracer's own file. Raises `UnsupportedError` if there is none."""


class Backend(ABC):
    """The device, the kernels and the transports of one vendor.

    A backend must define the abstract methods. The default of every other method reports that the feature is missing.
    """

    @property
    @abstractmethod
    def name(self) -> str:
        """Return the registry key, which is also the command-line value and the name of the folder."""

    @property
    @abstractmethod
    def capabilities(self) -> Capabilities:
        """Return the facts that other code may query."""

    @abstractmethod
    def probe(self) -> Probe:
        """Return whether this machine can run the backend. Does not raise if devices or packages are absent."""

    @abstractmethod
    def kernels(self) -> tuple[Kernel | LazyKernel, ...]:
        """Return the kernels for local attention, in order of preference."""

    def transport(self, group: Any, timeout: float) -> Transport:
        """Connect the ranks of a torch process group (None: the default one).

        Default: raise `UnsupportedError`, so the backend supports one rank only.
        """
        raise UnsupportedError(f"the backend {self.name!r} has no transport, so it supports one rank only")

    def connect_direct(self, other: Transport, group: Any, timeout: float) -> Transport:
        """Connect the `direct_transport` of the capabilities. Collective.

        Args:
            other: a transport of the same ranks, for the messages between passes.
            group: the process group of the ranks.
            timeout: seconds that a pass may wait for its next message.

        Raises:
            UnsupportedError: on all ranks, if one of them cannot use the transport.
        """
        raise UnsupportedError(f"the backend {self.name!r} has no direct transport")

    def group_options(self, timeout: timedelta) -> Any:
        """Return `pg_options` of torch process groups with this timeout, whose messages have high priority.

        Return None for torch's default options. See `comm.base.Transport.high_priority`.
        """
        return None

    def measured_hardware(self, ranks: int, kernel: str) -> HardwareSpec | None:
        """Return measured rates that predict plans for this many ranks.

        Return None if nothing was measured on such a machine. `kernel` is "" if it is not known yet.
        """
        return None

    def machines(self, ranks: int) -> Mapping[str, MeasuredHardware]:
        """Return the measured rates of known machines by a short name ("h200"), for plans that are made elsewhere."""
        return {}

    def peaks(self, dtype: str) -> Peaks:
        """Return the peak rates of the current device for matrix products of a dtype ("bfloat16")."""
        return Peaks("", dtype, None, None, f"the backend {self.name!r} states none")

    def meter(self, index: int) -> Meter:
        """Open the sensors of a device, by torch's index.

        Raises `BackendUnavailableError` with the reason if they cannot be read.
        """
        raise BackendUnavailableError(f"the backend {self.name!r} reads no sensors")

    def link_counters(self, index: int) -> LinkCounters:
        """Open the link counters of a device, by torch's index.

        Raises `BackendUnavailableError` with the reason if they cannot be read.
        """
        raise BackendUnavailableError(f"the backend {self.name!r} does not count what crosses links between devices")

    def tracer(self) -> Tracer | None:
        """Return the vendor's tracer, for profiles of kernels; None if torch.profiler traces the devices."""
        return None

    def kineto(self, events: list[dict[str, Any]]) -> list[dict[str, Any]] | None:
        """Convert the events of the vendor's trace to the form that Kineto writes; None for a trace of another tracer.

        Annotations and operators of the host stay unchanged. Events of a device get the category "kernel" or
        "gpu_memcpy" and the correlation of the call that launched them.
        """
        return None


def package_error(package: str, at_least: str, *, module: str | None = None, install: str | None = None) -> str:
    """Return why a vendor's package cannot be used, and the next step; "" if it can. For a `probe`.

    Absent, old and broken packages have different messages.

    Args:
        package: pip's name of the distribution.
        at_least: the lowest supported version, such as "2.13".
        module: a module to import as a test. Default: none.
        install: the next step. Default: a ``pip install`` command.
    """
    step = install or f"pip install '{package}>={at_least}'"
    try:
        found = version(package)
    except PackageNotFoundError:
        return format_error(f"the package {package} is not installed", allowed=f"{at_least} or later", next_step=step)
    if _numbers(found) < _numbers(at_least):
        return format_error(
            f"the package {package} is too old", got=found, allowed=f"{at_least} or later", next_step=step
        )
    if module:
        try:
            import_module(module)
        # Bindings of a missing library may raise anything. The message must name the package.
        except Exception as error:  # noqa: BLE001
            step = f"`python -c 'import {module}'` shows where; reinstall it, with the driver that it is made for"
            what = f"the package {package} {found} is broken: it fails to import"
            return format_error(what, got=in_a_line(error), next_step=step)
    return ""


def require_package(package: str, at_least: str, install: str | None = None) -> None:
    """Raise `BackendUnavailableError` with the text of `package_error` if a package is absent or too old."""
    if reason := package_error(package, at_least, install=install):
        raise BackendUnavailableError(reason)


def _numbers(text: str) -> tuple[int, ...]:
    """Return the numbers of a version: 2.13.0+rocm7.1 -> (2, 13, 0)."""
    return tuple(int(n) for n in re.findall(r"\d+", text.partition("+")[0]))


Facts = dict[str, Any]
TORCH = "2.11"
"""The lowest version of torch that accelerators need."""


class AcceleratorBackend(Backend):
    """A backend of devices that torch drives as `torch.<type>`, with streams.

    A vendor defines the reason why devices cannot be used, the kernels, and the facts for reports.
    """

    @abstractmethod
    def unavailable_reason(self) -> str:
        """Return why it cannot run on this machine and, after a semicolon, the next step; "" if it can. Never raise."""

    @abstractmethod
    def make_kernels(self) -> Iterable[Kernel | LazyKernel]:
        """Make the kernels, in order of preference. Called once."""

    @abstractmethod
    def describe(self, properties: Any) -> Facts:
        """Return facts from torch's properties of a usable device, in addition to name and memory."""

    @abstractmethod
    def libraries(self) -> Facts:
        """Return versions of libraries and the driver, and the links. Called only if devices can be used."""

    def probe(self) -> Probe:
        if reason := package_error("torch", TORCH) or self.unavailable_reason():
            return Probe(False, reason)
        module = torch.get_device_module(self.capabilities.device_type)
        properties = [module.get_device_properties(index) for index in range(module.device_count())]
        devices = [
            {"name": device.name, "memory_gib": round(device.total_memory / 2**30, 1), **self.describe(device)}
            for device in properties
        ]
        return Probe(True, facts={"devices": devices, **self.libraries()})

    def kernels(self) -> tuple[Kernel | LazyKernel, ...]:
        return self._kernels

    @cached_property
    def _kernels(self) -> tuple[Kernel | LazyKernel, ...]:
        return tuple(self.make_kernels())

    def transport(self, group: Any, timeout: float) -> Transport:
        return TorchDistTransport(group, self.capabilities.process_group, batched=True, timeout=timeout)

    def no_device_reason(self, missing: str, look_at: str) -> str:
        """Return why no device is usable, with torch's error when it starts the driver (absent, too old)."""
        try:
            torch.get_device_module(self.capabilities.device_type).init()
            result = "a driver that starts and shows no device"
        except (RuntimeError, AssertionError) as error:
            result = in_a_line(error)
        return format_error(missing, got=result, next_step=f"look at {look_at}")
