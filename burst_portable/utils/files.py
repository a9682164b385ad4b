"""Read and write files that users name, up to a size limit. Pipes, and small gzips of large files, raise an error."""

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
_LONGEST_REASON = 300  # characters
ParseFloat = Callable[[str], Any]


def write_text(path: str | Path, text: str) -> None:
    """Write a text file.

    Raises:
        InputError: If the file cannot be written.
    """
    try:
        Path(path).write_text(text, encoding="utf-8")
    except (OSError, TypeError, ValueError) as error:  # a value that is not a path raises TypeError or ValueError
        raise InputError(
            "this file cannot be written", got=f"{shown(path)}: {_describe(error)}", allowed="a path to a file"
        ) from error


def read_json(
    path: Path, what: str, largest: int, *, parse_float: ParseFloat | None = None, next_step: str | None = None
) -> Any:
    """Return the JSON of a file, which may be a gzip. The unpacked text has at most `largest` bytes.

    `what` ("a report") and `next_step` (how to create one) are for messages. `parse_float` converts decimals to
    numbers. Default: finite floats.

    Raises:
        InputError: If the file cannot be read, is too large or too deeply nested, or is not strict JSON.
    """
    try:
        mode = path.stat().st_mode
        if not stat.S_ISREG(mode):  # opening a pipe waits for its writer
            raise ValueError("a folder" if stat.S_ISDIR(mode) else "not a regular file")
        with path.open("rb") as file:
            unpacked: Any = gzip.GzipFile(fileobj=file) if file.peek(2)[:2] == _GZIP else file
            text: bytes = unpacked.read(largest + 1)
        if len(text) > largest:
            raise ValueError(f"a file of more than {largest >> 20} MiB")
    except (OSError, EOFError, ValueError, zlib.error) as error:
        raise InputError(f"{path} is not {what}", got=_describe(error), next_step=next_step) from error
    return parse_json(text, str(path), what, parse_float=parse_float, next_step=next_step)


def parse_json(
    text: bytes | str, source: str, what: str, *, parse_float: ParseFloat | None = None, next_step: str | None = None
) -> Any:
    """Return the JSON of a text. `source` is its name in messages; other arguments and errors as for `read_json`."""
    try:
        return json.loads(text, parse_float=parse_float or _finite, parse_constant=_reject)
    except RecursionError:
        got = "JSON that is nested too deeply"
        raise InputError(f"{source} is not {what}", got=got, next_step=next_step) from None
    except ValueError as error:
        raise InputError(f"{source} is not {what}", got=_describe(error), next_step=next_step) from error


def _describe(error: Exception) -> str:
    if isinstance(error, OSError):
        return error.strerror or str(error)  # without the path, which the message contains
    if isinstance(error, UnicodeDecodeError):
        return "bytes that are not text"
    text = " ".join(str(error).split())
    text = text if len(text) <= _LONGEST_REASON else f"{text[:_LONGEST_REASON]}..."
    return f"not JSON: {text}" if isinstance(error, json.JSONDecodeError) else text


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"the number {text[:40]}, which is too large")
    return number


def _reject(name: str) -> NoReturn:
    raise ValueError(f"{name}, which is not JSON")
