"""What a backend is: one vendor's device, kernels and transports, and the capabilities that others ask for.

Nothing outside a vendor's folder asks for a vendor's name; it asks a capability.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Protocol

from burst_portable.comm.base import Transport
from burst_portable.errors import BackendUnavailableError, explain, in_a_line
from burst_portable.kernels.contract import Kernel
from burst_portable.rates import Curve as Curve
from burst_portable.rates import Rates as Rates


@dataclass(frozen=True, slots=True)
class Capabilities:
    """Frozen facts about a backend.

    Attributes:
        device_type: the torch device type of its tensors.
        process_group: the process-group backend that moves them.
        streams: whether work is asynchronous and ordered by streams.
        rates: what plans are predicted with where nothing was measured.
        direct_transport: the name of a transport of its own for plans whose messages go straight to where they are
            used (`Plan.direct`); empty where there is none.
    """

    device_type: str
    process_group: str
    streams: bool
    rates: Rates
    direct_transport: str = ""


@dataclass(frozen=True, slots=True)
class Probe:
    """Whether a backend can run on this machine; the reason if not; what was found if it can."""

    ok: bool
    reason: str = ""
    facts: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Peaks:
    """The most that a device can do: the roofline that a profile is held against. What is not known is None.

    Attributes:
        device: its name.
        dtype: which `flops` are told for, as torch calls it without "torch.".
        flops: dense matrix FLOP/s in that dtype, summed in float32 at least.
        bandwidth: bytes/s of its memory, reads and writes together.
        source: who says so, for people; or why nothing is known.
        measured: whether they were measured on this machine; else its vendor tells them.
    """

    device: str
    dtype: str
    flops: float | None
    bandwidth: float | None
    source: str
    measured: bool = False


class Meter(Protocol):
    """The sensors of one device. A read takes the host less than a millisecond or two, and nothing of the device."""

    def read(self) -> dict[str, float]:
        """Those that it has: "watts", "megahertz" of what computes, "celsius", and "joules", counted since some moment
        in the past."""

    def close(self) -> None:
        """It is read no more."""


class LinkCounters(Protocol):
    """What has crossed the links from one device to others of its kind, whoever sent it: the device counts it."""

    def read(self) -> tuple[int, int]:
        """Bytes that it has sent, and received, since some moment in the past: those of messages, and of all else that
        is written or read over a link, without what the links' own protocol adds. Of work that is under way, some.
        Raises `BackendUnavailableError` where it cannot be read any more."""

    def close(self) -> None:
        """It is read no more."""


class Tracer(Protocol):
    """A vendor's own tracer of all that this process runs, with `torch.profiler.record_function` as annotations."""

    def start(self) -> None:
        """Begin to trace. Raises `UnsupportedError` where it cannot."""

    def stop(self) -> bytes:
        """Trace no more; the tracer's own file. Raises `UnsupportedError` where there is none."""


class Backend(Protocol):
    """One vendor. It may have more: see `Extras`."""

    @property
    def name(self) -> str:
        """Folder, registry key, command-line value."""

    @property
    def capabilities(self) -> Capabilities:
        """What others may ask for."""

    def probe(self) -> Probe:
        """Look at this machine. Does not raise for a vendor that is absent."""

    def kernels(self) -> tuple[Kernel, ...]:
        """Providers of local attention, the preferred first."""

    def transport(self, group: Any, deadline: float) -> Transport:
        """The transport of a torch process group (None: the default one)."""


class Extras(Protocol):
    """What a backend may have more; none of it has to be there. `registry` and `mesh` ask for it."""

    def measured_rates(self, ranks: int, kernel: str) -> Rates | None:
        """What plans for so many ranks are predicted with, where this kernel computes ("": not known yet); None where
        nothing was measured on such a machine."""

    def group_options(self, timeout: timedelta) -> Any:
        """The `pg_options` of torch process groups of such a timeout with which messages go first (see
        `comm.base.Transport.goes_first`); None where torch's own will do."""

    def peaks(self, dtype: str) -> Peaks:
        """What the current device can do at most, in matrix products of a dtype ("bfloat16")."""

    def meter(self, index: int) -> Meter:
        """The sensors of a device, by torch's index. Raises `BackendUnavailableError` with the reason where they cannot
        be read."""

    def link_counters(self, index: int) -> LinkCounters:
        """What crossed the links of a device, by torch's index. Raises `BackendUnavailableError` with the reason where
        that cannot be read."""

    def tracer(self) -> Tracer:
        """For the deep level of profiles: the vendor's own, where torch.profiler does not see its devices."""

    def kineto(self, events: list[dict[str, Any]]) -> list[dict[str, Any]] | None:
        """The events of that tracer's file as Kineto tells them: annotations and operators of the host as they are,
        what ran on a device as "kernel" or "gpu_memcpy", with a correlation that the launching call has as well. None
        for a file that is of another tracer."""

    def connect_direct(self, other: Transport, group: Any, deadline: float) -> Transport:
        """The `direct_transport` of its capabilities, for the ranks of `other`, which moves what goes on between
        passes. Collective. Raises `UnsupportedError`, on every rank alike, where these ranks cannot have it."""


def wrong_with(package: str, at_least: str, *, module: str | None = None, install: str | None = None) -> str:
    """What is wrong with a vendor's package here, and what to do; "" where nothing is. For a `probe`.

    Absent, too old and broken are told in three different ways.

    Args:
        package: the distribution, as pip calls it.
        at_least: the first version that will do, such as "2.13".
        module: imported to see whether it can be; nothing is imported unless given.
        install: what to do; ``pip install`` it unless given.
    """
    step = install or f"pip install '{package}>={at_least}'"
    try:
        found = version(package)
    except PackageNotFoundError:
        return explain(f"the package {package} is not installed", allowed=f"{at_least} or later", next_step=step)
    if _numbers(found) < _numbers(at_least):
        return explain(f"the package {package} is too old", got=found, allowed=f"{at_least} or later", next_step=step)
    return _import_error(package, found, module) if module else ""


def require(package: str, at_least: str, install: str | None = None) -> None:
    """For the top of a vendor's module: refuse to go on without a package, or with one that is too old.

    Raises `BackendUnavailableError`, with another message for each of the two; see `wrong_with`.
    """
    if reason := wrong_with(package, at_least, install=install):
        raise BackendUnavailableError(reason)


def _import_error(package: str, found: str, module: str) -> str:
    try:
        import_module(module)
    # Bindings of a library that is missing raise anything at all; the user must hear which package it was.
    except Exception as error:  # noqa: BLE001
        return explain(
            f"the package {package} {found} is broken: it fails to import",
            got=in_a_line(error),
            next_step=f"`python -c 'import {module}'` shows where; reinstall it, with the driver that it is made for",
        )
    return ""


def _numbers(text: str) -> tuple[int, ...]:
    """Of a version: 2.13.0+rocm7.1 -> (2, 13, 0)."""
    return tuple(int(n) for n in re.findall(r"\d+", text.partition("+")[0]))
