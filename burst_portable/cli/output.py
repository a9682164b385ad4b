"""Where a command's output goes: tables for people, JSON to a file or to standard output.

`--json` writes JSON and nothing else to standard output; `--json FILE` writes a file beside the tables. A place
that cannot be written to is refused before the work is done; streams that fail are the matter of `cli.process`.
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from burst_portable.errors import BurstError, InputError

JSON_HELP = "Write JSON to FILE beside the tables; without FILE, or as -, to standard output and nothing else there."
PRINT_JSON_HELP = "Print JSON to standard output instead of tables."
_PIPE_WIDTH = 120
_LABEL = 7  # characters


class _Console(Console):
    """rich ends the process with 1, which says that a check failed, where whoever read its output has gone."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


def console(*, stderr: bool = False, quiet: bool = False, soft_wrap: bool = False) -> Console:
    """For tables, or what else people read. In a pipe or a log it is wide: tables would be squeezed into 80 columns."""
    stream = sys.stderr if stderr else sys.stdout
    width = None if stream is not None and stream.isatty() else _PIPE_WIDTH
    return _Console(stderr=stderr, quiet=quiet, highlight=False, soft_wrap=soft_wrap, width=width)


def table(*columns: str, left: Iterable[str] = (), title: str | None = None) -> Table:
    """An empty table as every command has it: a rule below the head, numbers to the right, no frame.

    The first column and those of `left` hold words, and are set to the left. What does not fit goes on below: a name
    or a number that is cut is another one.
    """
    made = Table(title=title, box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    made.title_justify, made.title_style = "left", "bold"
    words = {columns[0], *left}
    for name in columns:
        made.add_column(name, justify="left" if name in words else "right", overflow="fold")
    return made


def labelled(label: str, text: str | Text, *, style: str = "") -> Table:
    """A word in a narrow column, and beside it the text about it, in as many lines as it takes."""
    made = Table.grid(padding=(0, 1, 0, 0))
    made.add_column(width=max(_LABEL, len(label)), no_wrap=True)
    made.add_column(style=style)
    made.add_row(Text(label), Text(text) if isinstance(text, str) else text)
    return made


def on_stderr(*, quiet: bool = False) -> dict[str, Any]:
    """For a bar of rich on stderr that is gone when the work is done; where nobody would see it, rich leaves a line."""
    place = console(stderr=True, quiet=quiet)
    return {"console": place, "transient": True, "disable": not place.is_terminal}


class UnwrittenError(BurstError):
    """A file that could be written when the command began and cannot be any more: nothing that was typed is wrong."""


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """While a file is written: `UnwrittenError`, which names it, where its disk is full, or its folder gone."""
    try:
        yield
    except (OSError, InputError) as error:
        cause = error if isinstance(error, OSError) else error.__cause__
        if isinstance(cause, BrokenPipeError) or not isinstance(cause, OSError):
            raise
        raise UnwrittenError(
            f"{path} cannot be written", got=cause.strerror, next_step="it is not whole, or not there"
        ) from error


class JsonOption:
    """What follows `--json`: a file, - for standard output, or None where it was not given.

    Raises `InputError` for a file that cannot be written, or that is one of `sources`, which the command reads.
    """

    def __init__(self, name: str | None, *, writes: bool = True, sources: Iterable[str | Path | None] = ()) -> None:
        self.stdout = name == "-"
        self.file = None if name is None or self.stdout else Path(name)
        if self.stdout and sys.stdout is None:
            raise InputError("--json has nowhere to write to", got="a closed standard output")
        if name == "":
            raise InputError("--json names no file", got="''", allowed="a file, or - for standard output")
        if self.file is not None and writes:
            check_file(self.file, "--json", sources=sources)

    @property
    def wanted(self) -> bool:
        """Whether there is anything to write."""
        return self.stdout or self.file is not None

    def write(self, data: Any) -> None:
        """Write it where it was asked for, if it was. Raises `UnwrittenError` for a disk that is full by now."""
        if self.wanted:
            self.write_text(json_text(data))

    def write_text(self, text: str) -> None:
        """The same for what is JSON already."""
        if self.stdout:
            sys.stdout.write(text)
        elif self.file is not None:
            with writing(self.file):
                self.file.write_text(text, encoding="utf-8")


def json_text(data: Any) -> str:
    """Data as JSON, with null for numbers that JSON does not have."""
    return json.dumps(_finite(data), indent=2, default=str, allow_nan=False) + "\n"


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {k: _finite(v) for k, v in value.items()}
    return [_finite(v) for v in value] if isinstance(value, list | tuple) else value


def check_file(path: Path, option: str, *, sources: Iterable[str | Path | None] = ()) -> None:
    """Refuse a place that cannot be written to, before the work is done. What is there stays as it is.

    `sources` are files that the command reads: they would be lost.
    """
    try:
        there = path.exists()
        if path.is_file() and any(name and os.path.exists(name) and path.samefile(name) for name in sources):
            raise InputError(f"{option} names the file that is read", got=str(path), allowed="another file")
        if path.is_dir():
            raise InputError(f"{option} names a folder", got=str(path), allowed="a file")
        if path.is_fifo():  # its reader would take a close for the end
            return
        with path.open("ab", buffering=0) as file:
            if path.is_char_device():
                file.write(b"\n")  # a full device says so no sooner; before JSON, a line's end means nothing
        if not there:
            path.unlink()
    except OSError as error:
        raise InputError(f"{option} cannot be written", got=f"{str(path)!r}: {error.strerror}") from error


def check_files(files: Mapping[str, Path | None], *, sources: Iterable[str | Path | None] = ()) -> None:
    """`check_file` for every option that names a file; two may not name one, where the later would be left."""
    named: dict[Path, str] = {}
    for option, file in files.items():
        if file is not None:
            check_file(file, option, sources=sources)
            if (other := named.setdefault(file.resolve(), option)) != option and not _takes_all(file):
                raise InputError(f"{other} and {option} name one file", got=str(file), allowed="a file for each")


def _takes_all(file: Path) -> bool:
    """Whether one write does not undo the one before: /dev/null, a pipe."""
    return file.exists() and not file.is_file()


def check_folder(path: Path, option: str) -> None:
    """Refuse a folder that nothing can be written into; it is made."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except FileExistsError as error:
        raise InputError(f"{option} names a file", got=str(path), allowed="a folder, made if absent") from error
    except OSError as error:
        got = f"{str(path)!r}: {error.strerror}"
        raise InputError(f"{option} cannot be made", got=got, allowed="a folder, made if absent") from error
    check_file(path / ".writable", option)
