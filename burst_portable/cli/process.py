"""Signals that end the command: what it has begun is taken back first, as after Ctrl-C."""

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
"""Default seconds in which several signals count as one; a later signal also ends the cleaning up."""
_AGAIN = 0.01  # seconds after which a signal is repeated if Python could not raise its exception


class Ended(BaseException):
    """A signal asked this process to end; what it has begun is taken back on the way out."""

    def __init__(self, number: int) -> None:
        self.number = number


@contextmanager
def ended_by_signals(*, last: bool, interval: float = SIGNAL_INTERVAL) -> Iterator[None]:
    """What batch systems and closed terminals send ends as Ctrl-C does: ranks are ended, temporary folders removed.

    Signals that this process was started deaf to, as by nohup, are left alone. If this command is the `last` thing that
    the process does, Ctrl-C is not heard after a signal that ended it. Signals within `interval` seconds count as one.
    """
    if threading.current_thread() is not threading.main_thread():  # the only one that may ask for signals
        yield
        return
    raising = _Raising(interval)
    sys.unraisablehook = raising.lost
    heard = [number for number in _SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
    before: dict[int, Any] = {number: signal.signal(number, raising.end) for number in heard}
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
    """Turns signals into `Ended`, and repeats a signal whose exception was lost.

    A signal may come while Python runs what cannot raise, a `__del__` or a weak reference's callback: importing
    transformers runs many. There the exception is printed and lost, and a single SIGTERM with it.
    """

    def __init__(self, interval: float) -> None:
        self.hook = sys.unraisablehook  # for all other exceptions that are lost
        self._interval = interval
        self._asked = -interval
        self._repeating: threading.Timer | None = None
        self._noting = False  # while `lost` runs, where Python cannot raise either

    def end(self, number: int, frame: Any) -> None:
        """The handler of the signals."""
        if monotonic() - self._asked >= self._interval:  # else it is the same wish again, and cleaning up goes on
            self._asked = monotonic()
            raise Ended(number)

    def lost(self, told: sys.UnraisableHookArgs) -> None:
        """The `sys.unraisablehook`."""
        if not isinstance(told.exc_value, Ended):
            self.hook(told)
            return
        self._noting = True
        try:
            if self._repeating is not None:
                self._repeating.cancel()
            self._repeating = threading.Timer(_AGAIN, self._repeat, (told.exc_value.number,))
            self._repeating.daemon = True
            self._repeating.start()
        finally:
            self._noting = False

    def _repeat(self, number: int) -> None:
        while self._noting:  # on a busy machine the timer may be over before `lost` is
            sleep(_AGAIN)
        self._asked = -self._interval  # only now: until then it is the same wish
        main_thread = threading.main_thread().ident
        assert main_thread is not None, "it runs"
        signal.pthread_kill(main_thread, number)

    def stop(self) -> None:
        """Repeat nothing any more."""
        if self._repeating is not None:
            self._repeating.cancel()
            self._repeating.join()


_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_PLAIN = dict(zip("→←·…µ≤²━╸╺█▓▒░", "><.~u<2---#=+-", strict=True))
_UNREAD = 128 + signal.SIGPIPE


def told(run: Callable[[], int], fail: Callable[[str, int], int]) -> int:
    """The exit code of `run`, or what comes of an output that fails: 141 where nobody reads it, else that of `fail`.

    `fail` is given what went wrong and its exit code, tells it, and returns the code.
    """
    tolerate_encodings()
    try:
        code = run()
        if sys.stdout is not None:
            sys.stdout.flush()  # while what goes wrong can still be told
        return code
    except BrokenPipeError:
        silence(sys.stdout)
        return _UNREAD
    except SystemExit as ended:
        if not isinstance(ended.__context__, BrokenPipeError):
            raise
        silence(sys.stdout)  # help is printed by a console of typer's own, which ends with 1 where nobody reads it
        return _UNREAD
    except OSError as error:
        if error.errno not in _FULL:
            raise
        silence(sys.stdout)
        return fail(f"the output cannot be written: {error.strerror}", 1)


def tolerate_encodings() -> None:
    """Show characters that a terminal's encoding lacks as similar ones, or as question marks."""
    codecs.register_error("burst_portable.plain", _plain)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="burst_portable.plain")


def _plain(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeEncodeError)
    return "".join(_PLAIN.get(c, "?") for c in error.object[error.start : error.end]), error.end


def silence(stream: Any) -> None:
    """Send what is left in a stream that failed to nowhere: the interpreter would complain of it when it ends."""
    with suppress(OSError, ValueError, AttributeError):
        stream.flush()  # it may have been a file that failed, and no stream
    with suppress(OSError, ValueError, AttributeError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)
