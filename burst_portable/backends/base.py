"""Define `Backend`, the contract between a vendor's device, kernels and transports and all other code.

Code outside a vendor's folder never queries a vendor's name, but a capability.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
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


@dataclass(frozen=True, slots=True)
class Capabilities:
    """Frozen facts about a backend.

    Attributes:
        device_type: the torch device type of its tensors.
        process_group: the process-group backend that moves them.
        streams: whether work is asynchronous and ordered by streams.
        rates: rates for predictions if nothing was measured.
        direct_transport: name of the backend's transport for plans whose messages go straight to where they are used
            (`Plan.direct`); empty if it has none.
    """

    device_type: str
    process_group: str
    streams: bool
    hardware: HardwareSpec
    direct_transport: str = ""


@dataclass(frozen=True, slots=True)
class Probe:
    """The answer of a probe: whether a backend can run on this machine, the reason if not, and facts."""

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
        source: source of the numbers, in words, or why they are unknown.
        measured: whether they were measured on this machine. If not, they are the vendor's.
    """

    device: str
    dtype: str
    flops: float | None
    bandwidth: float | None
    source: str
    measured: bool = False


class Meter(Protocol):
    """The sensors of one device. A read takes the host at most a millisecond or two, and the device no time."""

    def read(self) -> dict[str, float]:
        """Return the available readings: "watts", "megahertz" of the compute clock, "celsius", and "joules" since some
        moment in the past."""

    def close(self) -> None:
        """Release the sensors."""


class LinkCounters(Protocol):
    """Counters of one device for the bytes on its links to other devices of its kind."""

    def read(self) -> tuple[int, int]:
        """Return (sent, received) bytes since some moment in the past.

        Counts messages and all other writes and reads over a link, without the overhead of the link's protocol. Active
        transfers may be counted in part. Raises `BackendUnavailableError` if the counters can no longer be read.
        """

    def close(self) -> None:
        """Release the counters."""


class Tracer(Protocol):
    """A vendor's own tracer of all that this process runs, with `torch.profiler.record_function` as annotations."""

    def start(self) -> None:
        """Start tracing. Raises `UnsupportedError` if that is not possible."""

    def stop(self) -> bytes:
        """Stop tracing and return the tracer's own file. Raises `UnsupportedError` if there is none."""


class Backend(ABC):
    """The device, the kernels and the transports of one vendor.

    A backend must define what is abstract. Every other method has a default that says that the backend has none.
    """

    @property
    @abstractmethod
    def name(self) -> str:
        """Return the registry key, which is also the command-line value and the name of the folder."""

    @property
    @abstractmethod
    def capabilities(self) -> Capabilities:
        """Return the facts that other code may ask for."""

    @abstractmethod
    def probe(self) -> Probe:
        """Return whether this machine can run the backend. Does not raise if devices or packages are absent."""

    @abstractmethod
    def kernels(self) -> tuple[Kernel | LazyKernel, ...]:
        """Return the kernels for local attention, in order of preference."""

    def transport(self, group: Any, timeout: float) -> Transport:
        """Connect the ranks of a torch process group (None: the default one).

        Raises `UnsupportedError` unless overridden: a backend without transports serves one rank.
        """
        raise UnsupportedError(f"the backend {self.name!r} has no transport, so it serves one rank only")

    def connect_direct(self, other: Transport, group: Any, timeout: float) -> Transport:
        """Connect the `direct_transport` of the capabilities. Collective.

        Args:
            other: a transport of the same ranks, which moves messages between passes.

        Raises `UnsupportedError`, on every rank alike, if these ranks cannot have it.
        """
        raise UnsupportedError(f"the backend {self.name!r} has no direct transport")

    def group_options(self, timeout: timedelta) -> Any:
        """Return `pg_options` of torch process groups with this timeout, whose messages have high priority.

        Return None if torch's own options will do. See `comm.base.Transport.high_priority`.
        """
        return None

    def measured_hardware(self, ranks: int, kernel: str) -> HardwareSpec | None:
        """Return measured rates that predict plans for this many ranks.

        Return None if nothing was measured on such a machine. `kernel` is "" if it is not known yet.
        """
        return None

    def peaks(self, dtype: str) -> Peaks:
        """Return the most that the current device can do in matrix products of a dtype ("bfloat16")."""
        return Peaks("", dtype, None, None, f"the backend {self.name!r} does not tell")

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
        """Return the vendor's own tracer, for profiles of kernels; None if torch.profiler sees the devices."""
        return None

    def kineto(self, events: list[dict[str, Any]]) -> list[dict[str, Any]] | None:
        """Convert the events of the own tracer's file to what Kineto writes; None for the file of another tracer.

        Annotations and operators of the host stay as they are. What ran on a device becomes "kernel" or "gpu_memcpy"
        with the correlation of the launching call.
        """
        return None


def package_error(package: str, at_least: str, *, module: str | None = None, install: str | None = None) -> str:
    """Return what is wrong with a vendor's package here, and the next step; "" if nothing is. For a `probe`.

    Absent, too old and broken packages have different messages.

    Args:
        package: pip's name of the distribution.
        at_least: the lowest supported version, such as "2.13".
        module: module that is imported as a test. Default: none.
        install: the next step. Default: ``pip install``.
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
    return _import_error(package, found, module) if module else ""


def require_package(package: str, at_least: str, install: str | None = None) -> None:
    """Raise `BackendUnavailableError` if a package is absent or too old. For the top of a vendor's module.

    The message is that of `package_error`.
    """
    if reason := package_error(package, at_least, install=install):
        raise BackendUnavailableError(reason)


def _import_error(package: str, found: str, module: str) -> str:
    try:
        import_module(module)
    # Bindings of a missing library may raise anything. The message must name the package.
    except Exception as error:  # noqa: BLE001
        return format_error(
            f"the package {package} {found} is broken: it fails to import",
            got=in_a_line(error),
            next_step=f"`python -c 'import {module}'` shows where; reinstall it, with the driver that it is made for",
        )
    return ""


def _numbers(text: str) -> tuple[int, ...]:
    """Return the numbers of a version: 2.13.0+rocm7.1 -> (2, 13, 0)."""
    return tuple(int(n) for n in re.findall(r"\d+", text.partition("+")[0]))


Facts = dict[str, Any]
TORCH = "2.11"
"""The lowest version of torch that accelerators need."""


class AcceleratorBackend(Backend):
    """A backend of devices that torch drives as `torch.<type>`, with streams.

    A vendor defines why devices cannot be used, which kernels there are, and what reports say of its devices.
    """

    @abstractmethod
    def unavailable_reason(self) -> str:
        """Return why it cannot run on this machine and, after a semicolon, the next step; or "". Never raises."""

    @abstractmethod
    def make_kernels(self) -> Iterable[Kernel | LazyKernel]:
        """Make the kernels, in order of preference. Called once."""

    @abstractmethod
    def describe(self, properties: Any) -> Facts:
        """Return facts from torch's properties of a device, besides name and memory; called if devices can be used."""

    @abstractmethod
    def libraries(self) -> Facts:
        """Return versions of libraries and the driver, and the links; called if devices can be used."""

    def probe(self) -> Probe:
        if reason := package_error("torch", TORCH) or self.unavailable_reason():
            return Probe(False, reason)
        return Probe(True, facts={"devices": self._devices(), **self.libraries()})

    def kernels(self) -> tuple[Kernel | LazyKernel, ...]:
        return self._kernels

    @cached_property
    def _kernels(self) -> tuple[Kernel | LazyKernel, ...]:
        return tuple(self.make_kernels())

    def transport(self, group: Any, timeout: float) -> Transport:
        return TorchDistTransport(group, self.capabilities.process_group, batched=True, timeout=timeout)

    def no_device_reason(self, missing: str, look_at: str) -> str:
        """Return the reason for no device, with torch's message when it starts the driver: absent, too old ..."""
        try:
            torch.get_device_module(self.capabilities.device_type).init()
            said = "a driver that starts and shows no device"
        except (RuntimeError, AssertionError) as error:
            said = in_a_line(error)
        return format_error(missing, got=said, next_step=f"look at {look_at}")

    def _devices(self) -> list[Facts]:
        module = torch.get_device_module(self.capabilities.device_type)
        every = [module.get_device_properties(index) for index in range(module.device_count())]
        return [
            {"name": one.name, "memory_gib": round(one.total_memory / 2**30, 1), **self.describe(one)} for one in every
        ]
