"""Write the output of commands: tables to the terminal, JSON to a file or to standard output.

`--json` prints only JSON to standard output. `--json FILE` writes a file in addition to the tables. Paths are checked
before the work starts; `cli.process` handles streams that fail.
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from burst_portable.errors import BurstError, InputError

_JSON_HELP = "Write JSON to FILE; without FILE, or with -, to standard output, instead of tables. Default: tables only."
JsonName: TypeAlias = Annotated[str | None, typer.Option("--json", metavar="[FILE]", help=_JSON_HELP)]
_PIPE_WIDTH = 120
_LABEL = 7  # characters


class _Console(Console):
    """Raise `BrokenPipeError` if the reader has closed the output. rich would exit with 1, a failed check."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


def console(*, stderr: bool = False, quiet: bool = False, soft_wrap: bool = False) -> Console:
    """Return a console for tables and text. Pipes and logs get 120 columns instead of rich's 80."""
    stream = sys.stderr if stderr else sys.stdout
    width = None if stream is not None and stream.isatty() else _PIPE_WIDTH
    return _Console(stderr=stderr, quiet=quiet, highlight=False, emoji=False, soft_wrap=soft_wrap, width=width)


def table(*columns: str, left: Iterable[str] = (), title: str | None = None) -> Table:
    """Return an empty table in the style of all commands: a rule below the header, no frame.

    The first column and those in `left` are aligned left. Cells wrap, because a truncated name or number could be
    mistaken for another one.
    """
    made = Table(title=title, box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    made.title_justify, made.title_style = "left", "bold"
    aligned_left = {columns[0], *left}
    for name in columns:
        made.add_column(name, justify="left" if name in aligned_left else "right", overflow="fold")
    return made


def labelled(label: str, text: str | Text, *, style: str = "") -> Table:
    """Return a label in a narrow column and a text to its right, which may take several lines."""
    made = Table.grid(padding=(0, 1, 0, 0))
    made.add_column(width=max(_LABEL, len(label)), no_wrap=True)
    made.add_column(style=style)
    made.add_row(Text(label), Text(text) if isinstance(text, str) else text)
    return made


def on_stderr(*, quiet: bool = False) -> dict[str, Any]:
    """Return arguments of a rich progress bar on stderr that disappears at its end, and is off in a pipe or a log."""
    stderr = console(stderr=True, quiet=quiet)
    return {"console": stderr, "transient": True, "disable": not stderr.is_terminal}


class WriteError(BurstError):
    """A file could be written when the command started, but cannot be written now. The usage was valid."""


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Raise `WriteError` if a write in the block fails, for example on a full disk."""
    try:
        yield
    except (OSError, InputError) as error:
        cause = error if isinstance(error, OSError) else error.__cause__
        if isinstance(cause, BrokenPipeError) or not isinstance(cause, OSError):
            raise
        raise WriteError(
            f"{path} cannot be written", got=cause.strerror, next_step="the file is incomplete or missing"
        ) from error


class JsonOption:
    """The value of `--json`: a file, - for standard output, or None without the option.

    Raise `InputError` if the file cannot be written by a rank that `writes` it, or is one of `sources`, which it reads.
    """

    def __init__(self, name: str | None, *, writes: bool = True, sources: Iterable[str | Path | None] = ()) -> None:
        self.stdout = name == "-"
        self.file = None if name is None or self.stdout else Path(name)
        if self.stdout and sys.stdout is None:
            raise InputError("--json cannot write to standard output", got="a closed standard output")
        if name == "":
            raise InputError("--json names no file", got="''", allowed="a file, or - for standard output")
        if self.file is not None and writes:
            check_file(self.file, "--json", sources=sources)

    def write(self, data: Any) -> None:
        """Write data as JSON if the option was given. Raises `WriteError` if the disk is full."""
        if self.stdout or self.file is not None:
            self.write_text(json_text(data))

    def write_text(self, text: str) -> None:
        """Write JSON text if the option was given. Raises `WriteError` if the disk is full."""
        if self.stdout:
            sys.stdout.write(text)
        elif self.file is not None:
            with writing(self.file):
                self.file.write_text(text, encoding="utf-8")


def json_text(data: Any) -> str:
    """Return data as JSON, with null for NaN and infinity."""
    return json.dumps(_finite(data), indent=2, default=str, allow_nan=False) + "\n"


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {k: _finite(v) for k, v in value.items()}
    return [_finite(v) for v in value] if isinstance(value, list | tuple) else value


def check_file(path: Path, option: str, *, sources: Iterable[str | Path | None] = ()) -> None:
    """Raise `InputError` if the file of an option cannot be written, or is one of `sources`. It is not changed."""
    try:
        existed = path.exists()
        if path.is_file() and any(name and os.path.exists(name) and path.samefile(name) for name in sources):
            raise InputError(f"{option} names an input file of the command", got=str(path), allowed="another file")
        if path.is_dir():
            raise InputError(f"{option} names a folder", got=str(path), allowed="a file")
        if path.is_fifo():  # closing it would end its reader's input
            return
        with path.open("ab", buffering=0) as file:
            if path.is_char_device():
                file.write(b"\n")  # /dev/full fails only on write; JSON may begin with a newline
        if not existed:
            path.unlink()
    except OSError as error:
        raise InputError(f"{option} cannot be written", got=f"{str(path)!r}: {error.strerror}") from error


def check_picture(path: Path, *, sources: Iterable[str | Path | None] = ()) -> None:
    """Check the file of `--picture`. Raise `InputError` if its name does not end with .svg: pictures are SVG."""
    if path.suffix.lower() != ".svg" and not (path.exists() and not path.is_file()):  # a pipe may have any name
        next_step = "convert it to other formats with another program"
        raise InputError(
            "--picture writes SVG", got=str(path), allowed="a name that ends with .svg", next_step=next_step
        )
    check_file(path, "--picture", sources=sources)


def check_files(files: Mapping[str, Path | None], *, sources: Iterable[str | Path | None] = ()) -> None:
    """Check the file of each option, and raise `InputError` if two options name the same one."""
    options: dict[Path, str] = {}
    for option, file in files.items():
        if file is not None:
            check_file(file, option, sources=sources)
            # /dev/null, a pipe: a second write does not replace the first
            is_stream = file.exists() and not file.is_file()
            if (other := options.setdefault(file.resolve(), option)) != option and not is_stream:
                raise InputError(f"{other} and {option} name the same file", got=str(file), allowed="two files")


def check_folder(path: Path, option: str) -> None:
    """Create a folder, and raise `InputError` if files cannot be written to it."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except FileExistsError as error:
        raise InputError(f"{option} names a file", got=str(path), allowed="a folder") from error
    except OSError as error:
        raise InputError(f"{option} cannot be created", got=f"{str(path)!r}: {error.strerror}") from error
    check_file(path / ".writable", option)
