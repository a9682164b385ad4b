"""Define the frozen settings of a process. No other module reads ``BURST_*`` variables."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from burst_portable.errors import InputError, shown
from burst_portable.utils.values import as_float

_SHORTEST, _LONGEST = 1e-3, 1e9  # seconds; process groups count milliseconds and take 0 for no timeout
_SECONDS = "0.001 or more, below 1e9"
_SETTINGS = (
    "BURST_TIMEOUT",
    "BURST_KERNEL",
    "BURST_TRANSPORT",
    "BURST_HARDWARE_SPEC",
    "BURST_KERNEL_TIMES",
    "BURST_COMPILE_AHEAD",
)
_KEYS = tuple(map(os.environ.encodekey, _SETTINGS))
"""The names of the settings as `os.environ` stores them."""
_FLAGS = {"": True, "0": False, "1": True}


@dataclass(frozen=True, slots=True)
class Config:
    """Frozen settings of a process, created with the mesh.

    Attributes:
        timeout: Seconds until an unfinished transfer between ranks raises an error (``BURST_TIMEOUT``).
        kernel: Name of the local kernel, or "auto" (``BURST_KERNEL``).
        transport: Name of the transport, or "auto" (``BURST_TRANSPORT``).
        hardware_spec: Path of a file that `burst-portable measure` wrote on this machine; "auto" selects with its
            numbers (``BURST_HARDWARE_SPEC``). It is read at each selection. Default: "", the backend's own numbers.
        kernel_times: Path of a file that `burst-portable time-kernels` wrote on this machine; the kernel "auto" is then
            the fastest one in it (``BURST_KERNEL_TIMES``). Default: "", the first kernel of the backend that serves.
        compile_ahead: Whether the first call compiles the kernels of both passes side by side, before it launches one
            (``BURST_COMPILE_AHEAD``, 0 or 1). Default: True. With False, each launch compiles its kernel.
    """

    timeout: float = 600.0
    kernel: str = "auto"
    transport: str = "auto"
    hardware_spec: str = ""
    kernel_times: str = ""
    compile_ahead: bool = True

    def __post_init__(self) -> None:
        seconds = as_float(self.timeout)
        if seconds is None or not _SHORTEST <= seconds < _LONGEST:
            raise InputError("timeout must be a number of seconds", got=shown(self.timeout), allowed=_SECONDS)
        object.__setattr__(self, "timeout", seconds)
        for name in ("kernel", "transport"):
            if not isinstance(getattr(self, name), str):
                raise InputError(f"{name} must be a name", got=shown(getattr(self, name)), allowed="a string")
        for name in ("hardware_spec", "kernel_times"):
            given = getattr(self, name)
            file = os.fspath(given) if isinstance(given, os.PathLike) else given
            if not isinstance(file, str) or "\0" in file:
                raise InputError(f"{name} must name a file", got=shown(given), allowed="a file's name, or ''")
            object.__setattr__(self, name, file)
        if not isinstance(self.compile_ahead, bool):
            raise InputError("compile_ahead must be a bool", got=shown(self.compile_ahead), allowed="True or False")


def from_environment(environment: Mapping[str, str] | None = None) -> Config:
    """Return the settings of the environment variables, of this process by default. Empty ones count as unset."""
    if environment is not None:
        return _parse_settings(*[environment.get(name) or "" for name in _SETTINGS])
    # Every attention call without a mesh is here. `os.environ.get` takes 0.6 us for each variable, and this 0.03 us.
    stored: Mapping[Any, Any] | None = getattr(os.environ, "_data", None)
    if stored is None:  # `os.environ` has been replaced
        return from_environment(os.environ)
    return _parse_stored(*[stored.get(key) for key in _KEYS])


@lru_cache(maxsize=16)
def _parse_stored(*values: Any) -> Config:
    """Return the settings for values as `os.environ` stores them, None if unset."""
    return _parse_settings(*["" if value is None else os.environ.decodevalue(value) for value in values])


def _parse_settings(
    timeout: str, kernel: str, transport: str, hardware_spec: str, kernel_times: str, compile_ahead: str
) -> Config:
    """Return the settings of these texts. Empty ones count as unset."""
    try:
        seconds = float(timeout or "600")
    except ValueError:
        seconds = 0.0
    if not _SHORTEST <= seconds < _LONGEST:
        raise InputError("BURST_TIMEOUT must be a number of seconds", got=repr(timeout), allowed=_SECONDS)
    if compile_ahead not in _FLAGS:
        raise InputError("BURST_COMPILE_AHEAD must be a flag", got=repr(compile_ahead), allowed="0 or 1")
    return Config(seconds, kernel or "auto", transport or "auto", hardware_spec, kernel_times, _FLAGS[compile_ahead])


_TRITON_FOLDERS = ("TRITON_CACHE_DIR", "TRITON_HOME")
_COMPILER_VARIABLES = ("TRITON_", "MLIR_", "LLVM_", "NVPTX_", "PTXAS_", "DISABLE_", "USE_IR_LOC")


def triton_cache(environment: Mapping[str, str] | None = None) -> Path | None:
    """Return the folder of Triton's cache. None if variables of the environment may change what Triton compiles."""
    environment = os.environ if environment is None else environment
    if any(name.startswith(_COMPILER_VARIABLES) and name not in _TRITON_FOLDERS for name in environment):
        return None
    if folder := environment.get("TRITON_CACHE_DIR"):
        return Path(folder)
    home = environment.get("TRITON_HOME")
    return (Path(home) if home else Path.home()) / ".triton" / "cache"


class LauncherEnv(NamedTuple):
    """The environment variables that a launcher such as torchrun sets for a process."""

    rank: int
    world_size: int
    local_rank: int  # on its host
    address: str  # of the rendezvous, "host:port"


def read_launcher_env(environment: Mapping[str, str] | None = None) -> LauncherEnv | None:
    """Return the launcher's variables. None without a launcher, that is without ``RANK`` and ``WORLD_SIZE``."""
    environment = os.environ if environment is None else environment
    if "RANK" not in environment and "WORLD_SIZE" not in environment:
        return None
    found = {name: environment.get(name, "") for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")}
    if "LOCAL_RANK" in environment:
        found["LOCAL_RANK"] = environment["LOCAL_RANK"]
    listed = ", ".join(f"{name}={value!r}" for name, value in found.items() if value) or "nothing"
    next_step = "start with torchrun, or unset RANK and WORLD_SIZE to run without a launcher"
    if missing := [name for name, value in found.items() if not value]:
        raise InputError(f"a launcher has set {listed}, but not {', '.join(missing)}", next_step=next_step)
    rank, size = _count(found["RANK"]), _count(found["WORLD_SIZE"])
    local, port = _count(found.get("LOCAL_RANK", found["RANK"])), _count(found["MASTER_PORT"])
    if not (0 <= rank < size and local >= 0 and 0 < port < 1 << 16):
        allowed = "0 <= RANK < WORLD_SIZE, LOCAL_RANK at least 0, MASTER_PORT 1 to 65535"
        raise InputError("the launcher's variables are invalid", got=listed, allowed=allowed, next_step=next_step)
    return LauncherEnv(rank, size, local, f"{found['MASTER_ADDR']}:{port}")


def launched_processes() -> int:
    """Return the number of processes that a launcher started (``WORLD_SIZE``), 1 without a launcher."""
    return max(1, _count(os.environ.get("WORLD_SIZE", "")))


def _count(text: str) -> int:
    """Return the number in a text, or -1 if it is not a number."""
    return int(text) if text.isascii() and text.isdigit() and len(text) < 10 else -1


def environment_of_children(**changes: str) -> dict[str, str]:
    """Return the environment of this process with some changes, for processes that it starts."""
    return {**os.environ, **changes}


def listen_on_loopback(process_group: str) -> None:
    """Make process groups of this kind ("gloo", "nccl" ...) listen on the loopback interface only.

    Use it if all ranks run on one machine. By default a group listens on an address that other hosts can reach.
    """
    names = [name for _, name in socket.if_nameindex() if name.startswith("lo")]  # "lo", or "lo0" where BSD named it
    os.environ[f"{process_group.upper()}_SOCKET_IFNAME"] = min(names, key=len, default="lo")
