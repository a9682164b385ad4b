"""Share what the benchmark scripts need: types of options, and how a run ends."""

from __future__ import annotations

import sys
from argparse import ArgumentTypeError
from collections.abc import Callable, Collection
from pathlib import Path
from typing import NoReturn

import torch

from burst_portable.cli.process import guard_output
from burst_portable.errors import BackendUnavailableError, BurstError, CommunicationError
from burst_portable.utils.text import split_list


def count(text: str) -> int:
    """Parse an integer of at least 1."""
    number = int(text)
    if number < 1:
        raise ArgumentTypeError(f"{text} is less than 1")
    return number


def file(text: str) -> Path:
    """Parse the path of a file in an existing folder."""
    path = Path(text)
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise ArgumentTypeError(f"{text} is a folder, or lies in none")
    return path


def names(known: Collection[str], separator: str = ",") -> Callable[[str], list[str]]:
    """Return a parser of names from a list, separated by `separator`."""

    def listed(text: str) -> list[str]:
        found = split_list(text, separator)
        if unknown := [name for name in found if name not in known]:
            raise ArgumentTypeError(f"unknown: {', '.join(unknown)}; known are {f'{separator} '.join(known)}")
        return found

    return listed


def share(text: str) -> tuple[int, int]:
    """Parse I/N, the share I of N, counted from 0."""
    first, _, step = text.partition("/")
    if not 0 <= int(first) < count(step):
        raise ArgumentTypeError(f"{text} is no share; 0/2 and 1/2 are two halves")
    return int(first), int(step)


def current_device() -> torch.device:
    """Return the current accelerator, or the CPU if torch sees none."""
    if not torch.accelerator.is_available():
        return torch.device("cpu")
    return torch.device(torch.accelerator.current_accelerator().type, torch.accelerator.current_device_index())


def accelerator() -> torch.device:
    """Return the accelerator to measure. Raise `BackendUnavailableError` if there is none."""
    if (device := current_device()).type == "cpu":
        raise BackendUnavailableError("this measures an accelerator, and torch sees none here")
    return device


def end(main: Callable[[], int | None]) -> NoReturn:
    """Run a script and end as the command `burst-portable` does: its exit codes, one line on stderr, no traceback.

    If its output is closed, the exit code is 141; if the disk is full, it is 1.
    """
    sys.exit(guard_output(lambda: _code(main), _fail))


def _code(main: Callable[[], int | None]) -> int:
    try:
        return main() or 0
    except SystemExit as ended:  # of --help, or of the script itself: what was printed is still to be written
        if ended.code is not None and not isinstance(ended.code, int):
            raise
        return ended.code or 0
    except BurstError as error:
        return _fail(str(error), 1 if isinstance(error, CommunicationError) else 2)


def _fail(message: str, code: int) -> int:
    print(f"{Path(sys.argv[0]).name}: {' '.join(message.split())}", file=sys.stderr)
    return code
