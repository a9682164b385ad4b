"""Choose the backend of a command: the named one, or for "auto" the first that can run on this machine."""

from __future__ import annotations

from typing import TYPE_CHECKING

from burst_portable.backends.selection import known, load, probed
from burst_portable.errors import BackendUnavailableError, unknown_name

if TYPE_CHECKING:
    from burst_portable.backends.base import Backend


def choose_backend(name: str, ranks: int) -> tuple[Backend, str]:
    """Return a backend that can run this many ranks on this machine, and why "auto" chose it; "" for a named one.

    "auto" prefers an accelerator with a device per rank.

    Raises:
        UnknownNameError: If there is no backend of this name.
        BackendUnavailableError: If the backend cannot run, or for "auto", none can.
    """
    if name not in ("auto", *known()):
        raise unknown_name("backend", name, ("auto", *known()))
    if name != "auto":
        backend = load(name)
        if reason := _unavailable_reason(backend, ranks):
            raise BackendUnavailableError(f"the backend {name!r} cannot run here", got=reason)
        return backend, ""
    backends, reasons = [], []
    for one in known():
        try:
            backends.append(load(one))
        except BackendUnavailableError as error:
            reasons.append(_short_reason(one, str(error)))
    for backend in sorted(backends, key=lambda b: not b.capabilities.streams):
        if not (reason := _unavailable_reason(backend, ranks)):
            return backend, "; ".join([f"chose {backend.name}", *reasons])
        reasons.append(_short_reason(backend.name, reason))
    raise BackendUnavailableError(
        "no backend can run here", got="; ".join(reasons), next_step="run `burst-portable doctor`"
    )


def _short_reason(name: str, reason: str) -> str:
    """Return why a backend is not used, without the next step, which `burst-portable doctor` prints."""
    return f"not {name}: {reason.partition(';')[0]}"


def _unavailable_reason(backend: Backend, ranks: int) -> str | None:
    """Return why a backend cannot run this many ranks on this machine, or None if it can."""
    probe = probed(backend)
    if not probe.ok:
        return probe.reason
    if backend.capabilities.streams:
        import torch

        count = torch.get_device_module(backend.capabilities.device_type).device_count()
        if count < ranks:
            return f"{count} devices for {ranks} ranks"
    return None
