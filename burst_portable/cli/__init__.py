"""The command `burst-portable`, also `python -m burst_portable`: one file per command, listed in `cli.app`.

Exit codes: 0 all is well; 1 a check failed, ranks lost each other, or output could not be written; 2 something that was
typed cannot be used (one line on stderr says what, no traceback); 130 and 143 interrupted and terminated; 141 nobody
reads the output any more. An exception that nobody foresaw keeps its traceback.
"""

from __future__ import annotations

import errno
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from time import monotonic
from typing import Any

from burst_portable.errors import BurstError, CommunicationError, shown

PROGRAM = "burst-portable"
EXIT_CODES = (
    "Exit codes: 0 all is well, 1 a check failed or ranks lost each other, 2 something that was typed cannot be used "
    "(one line says what)."
)
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_PATIENCE = 1.0  # seconds in which signals to end count as one; a later one also ends the cleaning up
_AGAIN = 0.01  # seconds after which a signal is repeated if Python could not raise its exception
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command line, `sys.argv` unless given; returns the exit code."""
    if missing := [name for name in ("typer", "rich") if find_spec(name) is None]:
        return _fail(f"the command line needs {' and '.join(missing)}; in the clone, run: pip install '.[cli]'", 2)
    try:
        with _ended_by_signals(last=arguments is None):
            return _told(list(sys.argv[1:] if arguments is None else arguments))
    except _Ended as ended:
        return 128 + ended.number
    except KeyboardInterrupt:  # elsewhere than in the main thread of a process
        return 130


def _told(arguments: list[str]) -> int:
    """Runs it with an output that may have a poor encoding, be closed, or be full."""
    from burst_portable.cli.output import silence, tolerate_encodings

    tolerate_encodings()
    try:
        code = _run(arguments)
        if sys.stdout is not None:
            sys.stdout.flush()  # while what goes wrong can still be told
        return code
    except BrokenPipeError:
        silence(sys.stdout)
        return 128 + signal.SIGPIPE
    except SystemExit as ended:
        if not isinstance(ended.__context__, BrokenPipeError):
            raise
        silence(sys.stdout)  # help is printed by a console of typer's own, which ends with 1 where nobody reads it
        return 128 + signal.SIGPIPE
    except OSError as error:
        if error.errno not in _FULL:
            raise
        silence(sys.stdout)
        return _fail(f"the output cannot be written: {error.strerror}", 1)


def _run(arguments: list[str]) -> int:
    import typer

    from burst_portable.cli.app import command_line, with_json_value
    from burst_portable.cli.output import UnwrittenError

    try:
        arguments = with_json_value(arguments)
        return command_line(arguments).main(args=arguments, prog_name=PROGRAM, standalone_mode=False) or 0
    except (CommunicationError, UnwrittenError) as error:
        return _fail(str(error), 1)
    except BurstError as error:
        return _fail(str(error), 2)
    except typer.Abort:
        return 130
    except Exception as error:
        # A mistyped option. Its class has moved between releases of typer; what it can do has not.
        if hasattr(error, "format_message") and hasattr(error, "exit_code"):
            return _fail(_with_value(error.format_message(), error, arguments), 2)
        raise


def _with_value(message: str, error: Exception, arguments: list[str]) -> str:
    """The message with what was typed for the option, which some releases of typer leave out."""
    names = getattr(getattr(error, "param", None), "opts", ())
    pairs = zip(arguments, [*arguments[1:], ""], strict=True)
    typed = [value for name, value in pairs if name in names and value and not value.startswith("--")]
    typed += [a.partition("=")[2] for a in arguments if a.partition("=")[0] in names and "=" in a]
    told = ", ".join(map(shown, typed))
    return message if told in message else f"{message}; got {told}"


class _Ended(BaseException):
    """A signal asked this process to end; what it has begun is taken back on the way out."""

    def __init__(self, number: int) -> None:
        self.number = number


@contextmanager
def _ended_by_signals(*, last: bool) -> Iterator[None]:
    """What batch systems and closed terminals send ends as Ctrl-C does: ranks are ended, temporary folders removed.

    Signals that this process was started deaf to, as by nohup, are left alone. Where this command is the `last` thing
    that the process does, Ctrl-C is not heard after a signal that ended it.

    A signal may come while Python runs what cannot raise, a `__del__` or a weak reference's callback: importing
    transformers runs many. There the exception is printed and lost, and a single SIGTERM with it; so it is repeated.
    """
    if threading.current_thread() is not threading.main_thread():  # the only one that may ask for signals
        yield
        return

    asked = -_PATIENCE

    def end(number: int, frame: Any) -> None:
        nonlocal asked
        if monotonic() - asked >= _PATIENCE:  # else it is the same wish again, and what is taken back goes on
            asked = monotonic()
            raise _Ended(number)

    repeating: threading.Timer | None = None

    def repeat(number: int) -> None:
        nonlocal asked
        asked = -_PATIENCE  # not before: until then it is the same wish
        main_thread = threading.main_thread().ident
        assert main_thread is not None, "it runs"
        signal.pthread_kill(main_thread, number)

    def lost(told: sys.UnraisableHookArgs) -> None:
        nonlocal repeating
        if not isinstance(told.exc_value, _Ended):
            hook(told)
            return
        if repeating is not None:
            repeating.cancel()
        repeating = threading.Timer(_AGAIN, repeat, (told.exc_value.number,))
        repeating.daemon = True
        repeating.start()

    hook, sys.unraisablehook = sys.unraisablehook, lost
    heard = [number for number in _ENDING if signal.getsignal(number) is not signal.SIG_IGN]
    before: dict[int, Any] = {number: signal.signal(number, end) for number in heard}
    try:
        yield
    except _Ended:
        if last:
            before[signal.SIGINT] = signal.SIG_IGN
        raise
    finally:
        sys.unraisablehook = hook
        try:
            if repeating is not None:
                repeating.cancel()
                repeating.join()
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def _fail(message: str, code: int) -> int:
    if sys.stderr is not None:  # print would take standard output for one that is closed
        print(f"{PROGRAM}: {' '.join(message.split())}", file=sys.stderr)
    return code
