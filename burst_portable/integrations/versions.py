"""Check the versions of other frameworks, whose extension points differ between versions."""

from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError, version

from burst_portable.errors import UnsupportedError


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
