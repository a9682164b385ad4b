"""The command `burst-portable`, also `python -m burst_portable`: one file a command, listed in `cli.app`.

Exit codes: 0 all is well; 1 a check failed, or ranks lost each other; 2 something that was typed cannot be used
(one line on stderr says what, no traceback); 130 interrupted. An exception that nobody foresaw keeps its traceback.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.util import find_spec

from burst_portable.errors import BurstError, CommunicationError

PROGRAM = "burst-portable"


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command line, `sys.argv` unless given; returns the exit code."""
    if missing := [name for name in ("typer", "rich") if find_spec(name) is None]:
        return _fail(f"the command line needs {' and '.join(missing)}; run: pip install '{PROGRAM}[cli]'", 2)
    import typer

    from burst_portable.cli.app import command_line

    arguments = list(sys.argv[1:] if arguments is None else arguments)
    try:
        return command_line(arguments).main(args=arguments, prog_name=PROGRAM, standalone_mode=False) or 0
    except CommunicationError as error:
        return _fail(str(error), 1)
    except BurstError as error:
        return _fail(str(error), 2)
    except (KeyboardInterrupt, typer.Abort):
        return 130
    except Exception as error:
        # A mistyped option. Its class has moved between releases of typer; what it can do has not.
        if hasattr(error, "format_message") and hasattr(error, "exit_code"):
            return _fail(error.format_message(), 2)
        raise


def _fail(message: str, code: int) -> int:
    print(f"{PROGRAM}: {' '.join(message.split())}", file=sys.stderr)
    return code
