"""Save compiled kernels in the folder of Triton's cache, and find them again without Triton.

A process whose kernels Triton has cached still imports Triton, which then hashes 400 MB of its files for the keys. On
one H200 the first call took 1.0 s with heads of 256, and 0.2 s with this module. A key here has the version of Triton,
the size and the date of its library, and the text of our modules. If it is not found, Triton compiles the kernel, or
reads it from its own cache.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple


class Metadata(NamedTuple):
    """The part of Triton's metadata that a launch needs, with Triton's names."""

    num_warps: int
    shared: int
    num_ctas: int
    launch_pdl: bool
    launch_cooperative_grid: bool
    global_scratch_size: int
    profile_scratch_size: int
    tensordesc_meta: list[dict[str, Any]] | None


class SavedKernel(NamedTuple):
    """A kernel that Triton compiled before, with Triton's names."""

    name: str
    metadata: Metadata
    kernel: bytes  # the machine code


def file_of(
    folder: Path, name: str, target: str, key: Sequence[object], constants: Sequence[object], options: object
) -> Path | None:
    """Return the file for a kernel; None if Triton's library is not found.

    Args:
        folder: The folder of Triton's cache.
        name: Name of the jitted function.
        target: The chip.
        key: Everything on which the types of the arguments depend.
        constants: Compile-time constants.
        options: Launch options of Triton.
    """
    sources = _sources()
    if not sources:
        return None
    text = repr((sources, name, target, tuple(key), tuple(constants), options))
    return folder / "burst_portable" / f"{name}-{hashlib.sha256(text.encode()).hexdigest()}"


def save(file: Path, compiled: Any) -> None:
    """Save a kernel that Triton compiled. A folder that cannot be written keeps what it has."""
    facts = {name: getattr(compiled.metadata, name, None) for name in Metadata._fields}
    header = json.dumps({"name": compiled.name, "bytes": len(compiled.kernel), "metadata": facts})
    part = file.with_name(f"{file.name}.{os.getpid()}")
    with suppress(OSError):  # as an image with a filled cache
        file.parent.mkdir(parents=True, exist_ok=True)
        part.write_bytes(header.encode() + b"\n" + compiled.kernel)
        part.replace(file)


def find(file: Path) -> SavedKernel | None:
    """Return a saved kernel; None if there is none, or if its file is incomplete."""
    try:
        header, _, kernel = file.read_bytes().partition(b"\n")
        facts = json.loads(header)
        found = SavedKernel(facts["name"], Metadata(**facts["metadata"]), kernel)
        return found if len(kernel) == facts["bytes"] else None
    except (OSError, ValueError, KeyError, TypeError):  # absent, or text that `save` does not write
        return None


@cache
def _sources() -> str:
    """Return a hash of our kernels and of the installed Triton; "" if Triton's library is not found."""
    package = find_spec("triton")
    if package is None or package.origin is None:
        return ""
    try:
        library = (Path(package.origin).parent / "_C" / "libtriton.so").stat()
        facts = f"{version('triton')} {library.st_size} {library.st_mtime_ns}"
    except (OSError, PackageNotFoundError):
        return ""
    digest = hashlib.sha256(facts.encode())
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()
