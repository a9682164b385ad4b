"""Which backend a command takes, where ranks are to run."""

from __future__ import annotations

import torch

from burst_portable.backends.base import Backend
from burst_portable.backends.selection import known, load, probed
from burst_portable.errors import BackendUnavailableError, unknown_name


def choose_backend(name: str, ranks: int) -> tuple[Backend, str]:
    """The backend of this name, or for "auto" an accelerator with a device per rank, else one that needs none; and why.

    Raises `UnknownNameError`, or `BackendUnavailableError` with the reason.
    """
    if name not in ("auto", *known()):
        raise unknown_name("backend", name, ("auto", *known()))
    if name != "auto":
        backend = load(name)
        if reason := _missing(backend, ranks):
            raise BackendUnavailableError(f"the backend {name!r} cannot run here", got=reason)
        return backend, ""
    backends, reasons = [], []
    for one in known():
        try:
            backends.append(load(one))
        except BackendUnavailableError as error:  # nobody named it: a reason, like a probe's
            reasons.append(_briefly(one, str(error)))
    for backend in sorted(backends, key=lambda b: not b.capabilities.streams):
        if reason := _missing(backend, ranks):
            reasons.append(_briefly(backend.name, reason))
            continue
        return backend, "; ".join([f"chose {backend.name}", *reasons])
    raise BackendUnavailableError(
        "no backend can run here", got="; ".join(reasons), next_step="run `burst-portable doctor`"
    )


def _briefly(name: str, reason: str) -> str:
    """Why not this one, without what to do about it: nobody asked for it, and `burst-portable doctor` tells all."""
    return f"not {name}: {reason.partition(';')[0]}"


def _missing(backend: Backend, ranks: int) -> str | None:
    """Why a backend cannot run this many ranks on this machine, or None."""
    probe = probed(backend)
    if not probe.ok:
        return probe.reason
    if backend.capabilities.streams:
        count = torch.get_device_module(backend.capabilities.device_type).device_count()
        if count < ranks:
            return f"{count} devices for {ranks} ranks"
    return None
