"""The command `burst-portable`, also `python -m burst_portable`. `cli.app` lists the commands, one file each.

Exit codes:

- 0: success.
- 1: a check failed, ranks lost each other, or output could not be written.
- 2: invalid usage. One line on stderr describes it, without a traceback.
- 130, 143: interrupted, terminated.
- 141: the reader of the output closed it.

An unexpected exception keeps its traceback.

===================================  ===========================================================================
`app`                                the commands by name, and the application that typer makes of them.
`flags`, `strategy_flags`            options that commands share; flags for the options of strategies.
`backend_choice`, `machine_limits`   the backend of a command; cores and memory of this machine.
`output`, `process`                  tables, JSON and files; signals and streams that fail.
`run/`                               `run`: a job, its ranks, and the same job on one device.
`plan`                               `plan`, with `plan_hardware`, `plan_facts` (JSON), `plan_view` and `drawing`.
`plan_comparison`, `plan_chart`      `plan --strategy all`.
`bench`, `bench_options`             `bench`, with the ranks of `bench_worker`; `bench_files` reads its files.
`measure`, `time_kernels`            `measure`, with the ranks of `measure_worker`; `time-kernels`.
`conform`, `conform_view`            `conform`.
`profile`                            `profile`, `compare` and `trace`.
`kernels`, `warm`                    `kernels`, and its option `--warm`.
`doctor`, `init`                     `doctor`; `init`, which writes one of `scripts`.
===================================  ===========================================================================
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING

from burst_portable.cli.process import Ended, ended_by_signals, guard_output
from burst_portable.errors import BurstError, CommunicationError, shown

if TYPE_CHECKING:
    from burst_portable.cli.app import Command

PROGRAM = "burst-portable"
EXIT_CODES = "Exit codes: 0 success, 1 failed check or lost rank, 2 invalid usage."


def main(arguments: Sequence[str] | None = None, commands: Mapping[str, Command] | None = None) -> int:
    """Run one command line and return the exit code.

    Args:
        arguments: Words after the program's name. Default: those of `sys.argv`.
        commands: Commands by name. Default: `app.COMMANDS`.
    """
    if missing := [name for name in ("typer", "rich") if find_spec(name) is None]:
        return _fail(f"the command line needs {' and '.join(missing)}; in the clone, run: pip install '.[cli]'", 2)
    try:
        with ended_by_signals(last=arguments is None):
            words = list(sys.argv[1:] if arguments is None else arguments)
            return guard_output(lambda: _run(words, commands), _fail)
    except Ended as ended:
        return 128 + ended.number
    except KeyboardInterrupt:  # outside the main thread of a process
        return 130


def _run(arguments: list[str], commands: Mapping[str, Command] | None) -> int:
    import typer

    from burst_portable.cli.app import COMMANDS, add_json_value, command_line, help_line
    from burst_portable.cli.output import WriteError

    commands = COMMANDS if commands is None else commands
    try:
        arguments = add_json_value(arguments)
        return command_line(arguments, commands).main(args=arguments, prog_name=PROGRAM, standalone_mode=False) or 0
    except (CommunicationError, WriteError) as error:
        return _fail(str(error), 1)
    except BurstError as error:
        return _fail(str(error), 2)
    except typer.Abort:
        return 130
    except Exception as error:
        # An invalid option. Releases of typer differ in the class of the error, not in its methods.
        if hasattr(error, "format_message") and hasattr(error, "exit_code"):
            message = _add_value(error.format_message(), error, arguments).rstrip(".")
            separator = " " if message.endswith("?") else "; "
            return _fail(f"{message}{separator}see `{help_line(arguments, commands)}`", 2)
        raise


def _add_value(message: str, error: Exception, arguments: list[str]) -> str:
    """Add the option's value to the message, which some releases of typer omit."""
    names = getattr(getattr(error, "param", None), "opts", ())
    pairs = zip(arguments, [*arguments[1:], ""], strict=True)
    values = [value for name, value in pairs if name in names and value and not value.startswith("--")]
    values += [a.partition("=")[2] for a in arguments if a.partition("=")[0] in names and "=" in a]
    got = ", ".join(map(shown, values))
    return message if got in message else f"{message}; got {got}"


def _fail(message: str, code: int) -> int:
    if sys.stderr is not None:  # print(file=None) would write to standard output
        print(f"{PROGRAM}: {' '.join(message.split())}", file=sys.stderr)
    return code
