"""What a backend is: one vendor's device, kernels and transports, and the capabilities that others ask for.

Nothing outside a vendor's folder asks for a vendor's name; it asks a capability.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from burst_portable.comm.base import Transport
from burst_portable.cost import Rates as Rates
from burst_portable.kernels.contract import Kernel


@dataclass(frozen=True, slots=True)
class Capabilities:
    """Frozen facts about a backend.

    Attributes:
        device_type: the torch device type of its tensors.
        process_group: the process-group backend that moves them.
        streams: whether work is asynchronous and ordered by streams.
        rates: what plans are predicted with where nothing was measured.
    """

    device_type: str
    process_group: str
    streams: bool
    rates: Rates


@dataclass(frozen=True, slots=True)
class Probe:
    """Whether a backend can run on this machine; the reason if not; what was found if it can."""

    ok: bool
    reason: str = ""
    facts: Mapping[str, Any] = field(default_factory=dict)


class Backend(Protocol):
    """One vendor."""

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
