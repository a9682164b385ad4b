"""Frozen settings, and the one place that reads ``BURST_*`` variables."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from burst_portable.errors import InputError, explain


@dataclass(frozen=True, slots=True)
class Config:
    """Settings of a process; made once where a mesh is, and passed on from there.

    Attributes:
        deadline: seconds that a hop may take before it is an error (``BURST_DEADLINE``).
        kernel: the local kernel, or "auto" (``BURST_KERNEL``).
    """

    deadline: float = 600.0
    kernel: str = "auto"


def from_environment(environment: Mapping[str, str] | None = None) -> Config:
    """The settings that the environment asks for; `environment` stands in for it in tests.

    Raises `InputError` for a value that cannot be one.
    """
    environment = os.environ if environment is None else environment
    deadline = environment.get("BURST_DEADLINE", "600")
    try:
        seconds = float(deadline)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < 1e9:
        raise InputError(explain("BURST_DEADLINE is no number of seconds", got=repr(deadline), allowed="above 0"))
    return Config(deadline=seconds, kernel=environment.get("BURST_KERNEL", "auto"))
