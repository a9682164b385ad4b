"""The commands by name, and the typer application made of them."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Annotated, Any

import typer
from typer.main import get_command

from burst_portable import __version__
from burst_portable.cli import PROGRAM

# A command's module is imported when that command runs, or when help lists it; what is heavy it imports inside its
# function, so that planning does not wait for torch. A command returns its exit code, or None for 0.
COMMANDS = {
    "run": "burst_portable.cli.run:run",
    "plan": "burst_portable.cli.plan:plan",
    "profile": "burst_portable.cli.profile:profile",
    "compare": "burst_portable.cli.profile:compare",
    "trace": "burst_portable.cli.profile:trace",
    "doctor": "burst_portable.cli.doctor:doctor",
    "conform": "burst_portable.cli.conform:conform",
    "kernels": "burst_portable.cli.kernels:kernels",
}


def command_line(arguments: list[str]) -> Any:
    """The application with the one command that is asked for, or with all of them for help and for typos."""
    app = typer.Typer(context_settings={"help_option_names": ["-h", "--help"]}, add_completion=False)
    app.callback(invoke_without_command=True)(_options)
    asked = next((a for a in arguments if not a.startswith("-")), None)
    for name in [asked] if asked in COMMANDS else COMMANDS:
        app.command(name)(_load(COMMANDS[name]))
    return get_command(app)


def _load(target: str) -> Callable[..., int | None]:
    module, _, name = target.partition(":")
    function: Callable[..., int | None] = getattr(import_module(module), name)
    return function


def _options(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version and stop.")] = False,
) -> None:
    """Exact attention over a sequence that no single device can hold."""
    if version:
        print(f"{PROGRAM} {__version__}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        print(context.get_help())
