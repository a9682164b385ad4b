"""Check that other frameworks are installed, and their versions: extension points differ between versions."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version

from burst_portable.errors import PackageMissingError, UnsupportedError


@contextmanager
def importing(package: str, install: str) -> Iterator[None]:
    """Raise `PackageMissingError` if the imports of a `with` block find no package of this name.

    Args:
        package: Name of the package, as it is imported. The error of another missing module stays as it is.
        install: What pip installs to have it, as "burst-portable[lightning]".
    """
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != package:
            raise
        what, next_step = f"{package} is not installed, and this integration needs it", f'pip install "{install}"'
        raise PackageMissingError(what, got=error, next_step=next_step) from error


def check_version(package: str, first: str, end: str, *, extra: str | None = None) -> None:
    """Raise `UnsupportedError` unless an installed package has a version that this library supports.

    Args:
        package: Name of the distribution.
        first: First supported version, as "2.6".
        end: First version after those.
        extra: Extra of this library that installs the package. Default: none does.
    """
    try:
        found = version(package)
    except PackageNotFoundError:
        found = "no such package"
    if not _numbers(first) <= _numbers(found) < _numbers(end):
        wanted = f"burst-portable[{extra}]" if extra else f"{package}>={first},<{end}"
        next_step = f'pip install "{wanted}"'
        raise UnsupportedError(
            f"unsupported version of {package}", got=found, allowed=f">={first},<{end}", next_step=next_step
        )


def _numbers(text: str) -> tuple[int, ...]:
    """Return the leading numbers of a version: (2, 6, 1) for "2.6.1rc2"."""
    match = re.match(r"\d+(\.\d+)*", text)
    return tuple(map(int, match[0].split("."))) if match else ()
