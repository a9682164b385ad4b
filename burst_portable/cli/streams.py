"""Standard output that has a poor encoding, is closed, or is full: without a traceback, and told by the exit code."""

from __future__ import annotations

import codecs
import errno
import io
import os
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any

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
