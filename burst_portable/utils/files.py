"""Files that users name, read up to a limit: pipes are refused, and so are small gzips of large files."""

from __future__ import annotations

import gzip
import json
import math
import stat
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from burst_portable.errors import InputError, shown

_GZIP = b"\x1f\x8b"
ParseFloat = Callable[[str], Any]


def write_text(path: str | Path, text: str) -> None:
    """Raises `InputError` for a file that cannot be written."""
    try:
        Path(path).write_text(text, encoding="utf-8")
    except (OSError, TypeError, ValueError) as error:  # what is not a path raises one of the two others
        raise InputError(
            "this file cannot be written", got=f"{shown(path)}: {_told(error)}", allowed="a path to a file"
        ) from error


def read_json(
    path: Path, what: str, largest: int, *, parse_float: ParseFloat | None = None, next_step: str | None = None
) -> Any:
    """The JSON of a file, also of a gzip.

    Args:
        what: what the file should be, for errors: "a report".
        largest: bytes of the text, unpacked, at most.
        parse_float: turns decimals into numbers; finite floats unless given.
        next_step: where such a file comes from, for errors.

    Raises `InputError`, in one line, for a file that cannot be read, is too large or too deep, or is not strict JSON.
    """
    try:
        mode = path.stat().st_mode
        if not stat.S_ISREG(mode):  # to open a pipe is to wait for its writer
            raise ValueError("a folder" if stat.S_ISDIR(mode) else "not a regular file")
        with path.open("rb") as file:
            text = _read(gzip.GzipFile(fileobj=file) if file.peek(2)[:2] == _GZIP else file, largest)
    except (OSError, EOFError, ValueError, zlib.error) as error:
        raise InputError(f"{path} is not {what}", got=_told(error), next_step=next_step) from error
    return parse_json(text, str(path), what, parse_float=parse_float, next_step=next_step)


def parse_json(
    text: bytes | str, source: str, what: str, *, parse_float: ParseFloat | None = None, next_step: str | None = None
) -> Any:
    """The same, from text; `source` names it in errors."""
    try:
        return json.loads(text, parse_float=parse_float or _finite, parse_constant=_refused)
    except RecursionError:
        got = "JSON that is nested too deeply"
        raise InputError(f"{source} is not {what}", got=got, next_step=next_step) from None
    except ValueError as error:
        raise InputError(f"{source} is not {what}", got=_told(error), next_step=next_step) from error


def _told(error: Exception) -> str:
    if isinstance(error, OSError):
        return error.strerror or str(error)  # without the path, which stands before it
    if isinstance(error, UnicodeDecodeError):
        return "bytes that are not text"
    told = " ".join(str(error).split())[:300]
    return f"not JSON: {told}" if isinstance(error, json.JSONDecodeError) else told


def _read(file: Any, largest: int) -> bytes:
    data: bytes = file.read(largest + 1)
    if len(data) > largest:
        raise ValueError(f"a file of more than {largest >> 20} MiB")
    return data


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"the number {text[:40]}, which is too large")
    return number


def _refused(name: str) -> NoReturn:
    raise ValueError(f"{name}, which is not JSON")
