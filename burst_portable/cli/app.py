"""Define the commands by name, and build the typer application from them."""

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
"""A command as ``module:function``, or the function itself. It returns its exit code, or None for 0."""

# A command's module is imported when that command runs or when help lists it. Commands import torch and other large
# packages inside their functions, so that `plan` does not wait for torch.
COMMANDS: Mapping[str, Command] = {
    "run": "burst_portable.cli.run.command:run",
    "init": "burst_portable.cli.init:init",
    "plan": "burst_portable.cli.plan:plan",
    "profile": "burst_portable.cli.profile:profile",
    "compare": "burst_portable.cli.profile:compare",
    "trace": "burst_portable.cli.profile:trace",
    "measure": "burst_portable.cli.measure:measure",
    "bench": "burst_portable.cli.bench:bench",
    "doctor": "burst_portable.cli.doctor:doctor",
    "conform": "burst_portable.cli.conform:conform",
    "kernels": "burst_portable.cli.kernels:kernels",
    "time-kernels": "burst_portable.cli.time_kernels:time_kernels",
}


def command_line(arguments: list[str], commands: Mapping[str, Command] = COMMANDS) -> Any:
    """Build the application with the command of these arguments, or with all commands for help and typos."""
    app = typer.Typer(context_settings={"help_option_names": ["-h", "--help"]}, add_completion=False)
    app.callback(invoke_without_command=True, help=_join_lines(_options.__doc__ or ""), epilog=EXIT_CODES)(_options)
    named = _command_name(arguments)
    for name in [named] if named is not None and named in commands else commands:
        function = _load(commands[name])
        app.command(name, help=_join_lines(function.__doc__ or ""), epilog=EXIT_CODES)(function)
    made: Any = get_command(app)
    for command in made.commands.values():
        for option in command.params:
            _state_default(option)
    return made


def _state_default(option: Any) -> None:
    """Append an option's default to its help, as all other defaults are written."""
    default = option.default
    if option.secondary_opts:  # --check/--no-check
        (default,) = option.opts if default else option.secondary_opts
    elif option.required or default is None or default is False:
        return
    option.show_default = False
    option.help = f"{option.help} Default: {default}."


def add_json_value(arguments: list[str]) -> list[str]:
    """Add - (standard output) after a `--json` without a value."""
    pairs = zip(arguments, [*arguments[1:], "--"], strict=False)
    return [
        word
        for argument, following in pairs
        for word in ([argument, "-"] if argument == "--json" and _is_option(following) else [argument])
    ]


def _is_option(word: str) -> bool:
    return word.startswith("-") and word != "-"


def help_line(arguments: list[str], commands: Mapping[str, Command] = COMMANDS) -> str:
    """Return the command line that prints the help of the command of these arguments, or of all commands."""
    name = _command_name(arguments)
    return f"{PROGRAM} {name} --help" if name in commands else f"{PROGRAM} --help"


def _command_name(arguments: list[str]) -> str | None:
    return next((a for a in arguments if not a.startswith("-")), None)


def _load(command: Command) -> Callable[..., int | None]:
    if not isinstance(command, str):
        return command
    module, _, name = command.partition(":")
    function: Callable[..., int | None] = getattr(import_module(module), name)
    return function


def _join_lines(text: str) -> str:
    """Remove the line breaks inside the paragraphs of a docstring, except in examples."""
    parts = cleandoc(text).split("\n\n")
    return "\n\n".join(part if part.startswith(PROGRAM) else " ".join(part.split()) for part in parts)


def _options(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    """Compute exact attention over a sequence that is sharded over several devices.

    To start, `burst-portable doctor` lists what can run on this machine. `burst-portable run --check` trains a small
    model over two ranks and compares it with one device. `burst-portable COMMAND --help` lists options and examples.
    """
    if version:
        print(f"{PROGRAM} {__version__}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        print(context.get_help())
