"""Name the implementations of other libraries that `bench` compares: see `peers`."""

from __future__ import annotations

from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

from burst_portable.errors import UnsupportedError

PEERS = {
    "context_parallel": "torch",
    "context_parallel_alltoall": "torch",
    "ring_flash_attn": "ring_flash_attn",
    "ring_flash_attn_llama3": "ring_flash_attn",
    "ring_flash_attn_llama3_at_once": "ring_flash_attn",
    "yunchang": "yunchang",
    "magi_attention": "magi_attention",
}
"""The package of each implementation."""
_ALSO_ON_CPUS = ("ring_flash_attn", "yunchang")


def available_peers(*, on_cpu: bool) -> list[str]:
    """Return the implementations whose package is installed and runs on this kind of device."""
    return [
        name
        for name, package in PEERS.items()
        if find_spec(package) is not None and (package in _ALSO_ON_CPUS or not on_cpu)
    ]


def check_installed(package: str) -> None:
    """Raise `UnsupportedError` if a package is not installed."""
    if find_spec(package) is None:
        raise UnsupportedError(f"the package {package} is not installed")


def versions(packages: Iterable[str]) -> dict[str, str]:
    """Return the versions of the packages that are installed as distributions, sorted by name."""
    found = {}
    for name in sorted(set(packages)):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
