"""The command `burst-portable`, also `python -m burst_portable`: one file per command, listed in `cli.app`.

Exit codes: 0 all is well; 1 a check failed, ranks lost each other, or output could not be written; 2 something that was
typed cannot be used (one line on stderr says what, no traceback); 130 and 143 interrupted and terminated; 141 nobody
reads the output any more. An exception that nobody foresaw keeps its traceback.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING

from burst_portable.cli.process import Ended, ended_by_signals, told
from burst_portable.errors import BurstError, CommunicationError, shown

if TYPE_CHECKING:
    from burst_portable.cli.app import Command

PROGRAM = "burst-portable"
EXIT_CODES = (
    "Exit codes: 0 all is well, 1 a check failed or ranks lost each other, 2 something that was typed cannot be used "
    "(one line says what)."
)


def main(arguments: Sequence[str] | None = None, commands: Mapping[str, Command] | None = None) -> int:
    """Run one command line and return the exit code.

    Args:
        arguments: Default: those of the process, `sys.argv`.
        commands: Commands by name. Default: `app.COMMANDS`.
    """
    if missing := [name for name in ("typer", "rich") if find_spec(name) is None]:
        return _fail(f"the command line needs {' and '.join(missing)}; in the clone, run: pip install '.[cli]'", 2)
    try:
        with ended_by_signals(last=arguments is None):
            given = list(sys.argv[1:] if arguments is None else arguments)
            return told(lambda: _run(given, commands), _fail)
    except Ended as ended:
        return 128 + ended.number
    except KeyboardInterrupt:  # elsewhere than in the main thread of a process
        return 130


def _run(arguments: list[str], commands: Mapping[str, Command] | None) -> int:
    import typer

    from burst_portable.cli.app import COMMANDS, command_line, help_line, with_json_value
    from burst_portable.cli.output import UnwrittenError

    commands = COMMANDS if commands is None else commands
    try:
        arguments = with_json_value(arguments)
        return command_line(arguments, commands).main(args=arguments, prog_name=PROGRAM, standalone_mode=False) or 0
    except (CommunicationError, UnwrittenError) as error:
        return _fail(str(error), 1)
    except BurstError as error:
        return _fail(str(error), 2)
    except typer.Abort:
        return 130
    except Exception as error:
        # A mistyped option. Its class has moved between releases of typer; what it can do has not.
        if hasattr(error, "format_message") and hasattr(error, "exit_code"):
            message = _with_value(error.format_message(), error, arguments).rstrip(".")
            joint = " " if message.endswith("?") else "; "
            return _fail(f"{message}{joint}`{help_line(arguments, commands)}` shows what there is", 2)
        raise


def _with_value(message: str, error: Exception, arguments: list[str]) -> str:
    """The message with what was typed for the option, which some releases of typer leave out."""
    names = getattr(getattr(error, "param", None), "opts", ())
    pairs = zip(arguments, [*arguments[1:], ""], strict=True)
    typed = [value for name, value in pairs if name in names and value and not value.startswith("--")]
    typed += [a.partition("=")[2] for a in arguments if a.partition("=")[0] in names and "=" in a]
    got = ", ".join(map(shown, typed))
    return message if got in message else f"{message}; got {got}"


def _fail(message: str, code: int) -> int:
    if sys.stderr is not None:  # print would take standard output for one that is closed
        print(f"{PROGRAM}: {' '.join(message.split())}", file=sys.stderr)
    return code
