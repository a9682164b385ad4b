"""The commands by name, and the typer application made of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from inspect import cleandoc
from typing import Annotated, Any, TypeAlias

import typer
from typer.main import get_command

from burst_portable import __version__
from burst_portable.cli import EXIT_CODES, PROGRAM

Command: TypeAlias = str | Callable[..., int | None]
"""A command as ``module:function``, or the function itself."""

# A command's module is imported when that command runs, or when help lists it; what is heavy it imports inside its
# function, so that planning does not wait for torch. A command returns its exit code, or None for 0.
COMMANDS: Mapping[str, Command] = {
    "run": "burst_portable.cli.run.command:run",
    "plan": "burst_portable.cli.plan:plan",
    "profile": "burst_portable.cli.profile:profile",
    "compare": "burst_portable.cli.profile:compare",
    "trace": "burst_portable.cli.profile:trace",
    "measure": "burst_portable.cli.measure:measure",
    "doctor": "burst_portable.cli.doctor:doctor",
    "conform": "burst_portable.cli.conform:conform",
    "kernels": "burst_portable.cli.kernels:kernels",
}
_READERS = ("profile", "compare", "trace")
"""Commands whose arguments are files to read: none of them may be taken for the file that --json writes."""


def command_line(arguments: list[str], commands: Mapping[str, Command] = COMMANDS) -> Any:
    """The application with the one command that is asked for, or with all of them for help and for typos."""
    app = typer.Typer(context_settings={"help_option_names": ["-h", "--help"]}, add_completion=False)
    app.callback(invoke_without_command=True, help=_paragraphs(_options.__doc__ or ""), epilog=EXIT_CODES)(_options)
    asked = _asked(arguments)
    for name in [asked] if asked is not None and asked in commands else commands:
        function = _load(commands[name])
        app.command(name, help=_paragraphs(function.__doc__ or ""), epilog=EXIT_CODES)(function)
    return get_command(app)


def with_json_value(arguments: list[str]) -> list[str]:
    """The arguments, with - (standard output) after a `--json` without a value. Commands that read files take none."""
    readers = _asked(arguments) in _READERS
    made: list[str] = []
    for argument, following in zip(arguments, [*arguments[1:], "--"], strict=False):
        if readers and argument == "-" and made[-1:] == ["--json"]:
            continue
        made.append(argument)
        if argument == "--json" and not readers and following.startswith("-") and following != "-":
            made.append("-")
    return made


def help_line(arguments: list[str], commands: Mapping[str, Command] = COMMANDS) -> str:
    """What to type for the help of the command that these arguments ask for, or of all."""
    asked = _asked(arguments)
    return f"{PROGRAM} {asked} --help" if asked in commands else f"{PROGRAM} --help"


def _asked(arguments: list[str]) -> str | None:
    return next((a for a in arguments if not a.startswith("-")), None)


def _load(command: Command) -> Callable[..., int | None]:
    if not isinstance(command, str):
        return command
    module, _, name = command.partition(":")
    function: Callable[..., int | None] = getattr(import_module(module), name)
    return function


def _paragraphs(text: str) -> str:
    """A docstring without the line breaks inside its paragraphs, but for examples."""
    parts = cleandoc(text).split("\n\n")
    return "\n\n".join(part if part.startswith(PROGRAM) else " ".join(part.split()) for part in parts)


def _options(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version and stop.")] = False,
) -> None:
    """Exact attention over a sequence that no single device can hold.

    To begin with, `burst-portable doctor` says what can run here, and `burst-portable run --check` trains a small model
    over two ranks and compares it with one device. `burst-portable COMMAND --help` has the options and examples.
    """
    if version:
        print(f"{PROGRAM} {__version__}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        print(context.get_help())
