"""Handle signals and failing output streams: clean up first, then exit with the documented code."""

from __future__ import annotations

import codecs
import errno
import io
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from time import monotonic, sleep
from typing import Any

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
SIGNAL_INTERVAL = 1.0
"""Default seconds in which several signals count as one. A later signal also interrupts the cleanup."""
_RETRY = 0.01  # seconds after which a signal is repeated if Python could not raise its exception


class Ended(BaseException):
    """A signal asked this process to end. Cleanup runs while the exception propagates."""

    def __init__(self, number: int) -> None:
        self.number = number


@contextmanager
def ended_by_signals(*, last: bool, interval: float = SIGNAL_INTERVAL) -> Iterator[None]:
    """Raise `Ended` on SIGINT, SIGTERM and SIGHUP, so that ranks are ended and temporary folders removed.

    Signals that were ignored when this process started, as by nohup, stay ignored.

    Args:
        last: Whether this command is the last work of the process. Ctrl-C is then ignored after `Ended`.
        interval: Seconds in which several signals count as one.
    """
    if threading.current_thread() is not threading.main_thread():  # only the main thread may set signal handlers
        yield
        return
    raising = _Raising(interval)
    sys.unraisablehook = raising.on_unraisable
    handled = [number for number in _SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
    before: dict[int, Any] = {number: signal.signal(number, raising.on_signal) for number in handled}
    try:
        yield
    except Ended:
        if last:
            before[signal.SIGINT] = signal.SIG_IGN
        raise
    finally:
        sys.unraisablehook = raising.hook
        try:
            raising.stop()
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


class _Raising:
    """Turn signals into `Ended`, and repeat a signal whose exception was lost.

    A signal may arrive while Python runs code that cannot raise: a `__del__` or a weak reference's callback. Importing
    transformers runs many. Python prints and drops the exception there, and with it a single SIGTERM.
    """

    def __init__(self, interval: float) -> None:
        self.hook = sys.unraisablehook  # for all other exceptions that are lost
        self._interval = interval
        self._last = -interval
        self._timer: threading.Timer | None = None
        self._in_hook = False  # Python cannot raise in the hook either

    def on_signal(self, number: int, frame: Any) -> None:
        """Raise `Ended` unless the last signal arrived less than `interval` seconds ago."""
        if monotonic() - self._last >= self._interval:
            self._last = monotonic()
            raise Ended(number)

    def on_unraisable(self, unraisable: sys.UnraisableHookArgs) -> None:
        """Repeat the signal of a lost `Ended` after a moment (a `sys.unraisablehook`)."""
        if not isinstance(unraisable.exc_value, Ended):
            self.hook(unraisable)
            return
        self._in_hook = True
        try:
            if self._timer is not None:
                self._timer.cancel()
            self._timer = threading.Timer(_RETRY, self._repeat, (unraisable.exc_value.number,))
            self._timer.daemon = True
            self._timer.start()
        finally:
            self._in_hook = False

    def _repeat(self, number: int) -> None:
        while self._in_hook:  # on a busy machine the timer may fire before the hook has returned
            sleep(_RETRY)
        self._last = -self._interval  # only now: an earlier signal still counts as the same one
        main_thread = threading.main_thread().ident
        assert main_thread is not None, "it runs"
        signal.pthread_kill(main_thread, number)

    def stop(self) -> None:
        """Cancel a pending repetition."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer.join()


_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_PLAIN = dict(zip("→←·…µ≤²━╸╺█▓▒░", "><.~u<2---#=+-", strict=True))
_BROKEN_PIPE = 128 + signal.SIGPIPE


def guard_output(run: Callable[[], int], fail: Callable[[str, int], int]) -> int:
    """Return the exit code of `run`; 141 if the reader of standard output has closed it; 1 if the disk is full.

    `fail` prints a message and returns the exit code that it is given.
    """
    tolerate_encodings()
    try:
        code = run()
        if sys.stdout is not None:
            sys.stdout.flush()  # an error can be reported only while this function runs
        return code
    except BrokenPipeError:
        silence(sys.stdout)
        return _BROKEN_PIPE
    except SystemExit as ended:
        if not isinstance(ended.__context__, BrokenPipeError):
            raise
        silence(sys.stdout)  # typer prints help on its own console, which exits with 1 on a broken pipe
        return _BROKEN_PIPE
    except OSError as error:
        if error.errno not in _FULL:
            raise
        silence(sys.stdout)
        return fail(f"the output cannot be written: {error.strerror}", 1)


def tolerate_encodings() -> None:
    """Replace characters that a terminal's encoding lacks by similar ones, or by question marks."""
    codecs.register_error("burst_portable.plain", _plain)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="burst_portable.plain")


def _plain(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeEncodeError)
    return "".join(_PLAIN.get(c, "?") for c in error.object[error.start : error.end]), error.end


def silence(stream: Any) -> None:
    """Discard the buffered text of a failed stream. Otherwise the interpreter reports it at exit."""
    with suppress(OSError, ValueError, AttributeError):
        stream.flush()  # a file may have failed, and not the stream
    with suppress(OSError, ValueError, AttributeError):
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, stream.fileno())
        os.close(null)
