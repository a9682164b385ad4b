"""Define a thread that detects missing messages, since a stream that waits for a flag has no timeout.

The time starts when the device begins a pass, and again when a message arrives. At the timeout, the thread prints rank,
step and peer to standard error, fills the inbox with NaN and lets the streams continue. So no rank hangs, the results
are NaN, and the next call of the transport on this rank raises the error.
"""

from __future__ import annotations

import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from burst_portable.backends.cuda.driver import leave_captures_alone
from burst_portable.comm.peer_copy import MARKS, Watched
from burst_portable.errors import LATE, SAME_CALLS, CommunicationError, CommunicationTimeoutError, MismatchError
from burst_portable.utils.threads import Background

EVERY = 0.2
"""Default seconds between two checks."""
QUIET = 1.0
"""Default seconds of a pass before its flags are read."""
_RELEASE_SECONDS = 5.0  # seconds for the streams of a pass to finish once its flags are set
_NUMBER = 16  # bits of a mark below the number of its pass
_MOST_AHEAD = 1 << 10  # passes by which a peer may be ahead; a flag further ahead belongs to an old pass


@dataclass(eq=False)
class WatchedPass:
    """The events of one pass, and the flags that it waits for."""

    entered: torch.cuda.Event
    left: torch.cuda.Event | None = None
    expected: list[tuple[int, int, Watched]] = field(default_factory=list)

    def over(self) -> bool:
        """Return whether the device has completed it."""
        return self.left is not None and self.left.query()


class Watch:
    """Watch the passes of one rank.

    Args:
        device: device of the passes.
        timeout: seconds without a message after which a pass fails.
        read: returns this rank's current flags. It may synchronize the current stream, which only the watch uses.
        release: lets streams continue that wait for these flags: (flag, mark).
        every: seconds between two checks.
        quiet: seconds of a pass before its flags are read.
    """

    def __init__(
        self,
        device: torch.device,
        timeout: float,
        read: Callable[[], list[int]],
        release: Callable[[list[tuple[int, int]]], None],
        *,
        every: float = EVERY,
        quiet: float = QUIET,
    ) -> None:
        self.failed: CommunicationError | None = None
        self._device, self.timeout, self._read, self._release = device, timeout, read, release
        self._every, self._quiet = every, quiet
        self._passes: deque[WatchedPass] = deque()
        self._current: WatchedPass | None = None  # the pass of the host; the thread may have dropped it
        self._looking = threading.Lock()  # held while flags are read, and while passes are dropped
        self._thread: Background[Watch] | None = None
        self._ready = False

    def begin(self, stream: torch.cuda.Stream) -> None:
        """Record that a pass begins on a stream."""
        entered = torch.cuda.Event()
        entered.record(stream)
        self._current = WatchedPass(entered)
        self._passes.append(self._current)
        if self._thread is None:
            self._thread = Background(self, Watch._watch, "burst_portable peer watch")
        if len(self._passes) == 1:
            self._thread.wake(self)

    def expect(self, flags: Sequence[int], mark: int, what: Watched) -> None:
        """Record that the pass waits for flags."""
        assert self._current is not None, "a pass has begun"
        self._current.expected += [(flag, mark, what) for flag in flags]

    def end(self, stream: torch.cuda.Stream) -> torch.cuda.Event:
        """Record that the stream has all work of the pass, and return the event of its end."""
        left = torch.cuda.Event()
        left.record(stream)
        assert self._current is not None, "a pass has begun"
        self._current.left = left
        return left

    def forget(self) -> None:
        """Drop all passes, which are over, before their flags are freed. Marks then start again."""
        with self._looking:
            self._passes.clear()

    def stop(self) -> None:
        """Stop the thread, before the memory is freed."""
        if self._thread is not None:
            self._thread.stop()

    # ------------------------------------------------------------------------------------------ the thread

    def _watch(self) -> None:
        """Watch until all passes are over."""
        if not self._ready:
            torch.cuda.set_device(self._device)
            leave_captures_alone()
            torch.cuda.set_stream(torch.cuda.Stream(self._device))
            self._ready = True
        while self._passes and self.failed is None and self._pause(self._every):
            if (one := self._oldest()) is not None and one.entered.query():
                self._watch_pass(one)

    def _oldest(self) -> WatchedPass | None:
        """Return the first pass that is not over."""
        with self._looking:
            while self._passes and self._passes[0].over():
                self._passes.popleft()
            return self._passes[0] if self._passes else None

    def _next(self) -> WatchedPass | None:
        """Remove and return the first pass."""
        with self._looking:
            return self._passes.popleft() if self._passes else None

    def _pause(self, seconds: float) -> bool:
        assert self._thread is not None, "this is the thread"
        return self._thread.pause(seconds)

    def _watch_pass(self, one: WatchedPass) -> None:
        """Watch a pass that the device has begun until it is over or fails."""
        since, seen = time.monotonic(), None
        while not one.over() and self._pause(min(self._every, self.timeout / 4)):
            if time.monotonic() - since < min(self._quiet, self.timeout / 2):
                continue
            now = self._flags_of(one)
            if now is None:
                return
            if seen is not None and now != seen:
                since = time.monotonic()
            seen = now
            missing = [(flag, mark, what) for flag, mark, what in tuple(one.expected) if now[flag] != mark]
            of_another_call = [wait for wait in missing if now[wait[0]] >> _NUMBER == wait[1] >> _NUMBER]
            if of_another_call or (missing and time.monotonic() - since >= self.timeout):
                behind = [wait for wait in missing if not _ahead(now[wait[0]], wait[1])]
                flag, _, what = (of_another_call or behind or missing)[0]
                if of_another_call:
                    text = f"{what(flag)}: a message of another call arrived instead"
                    self._fail(MismatchError(text, next_step=SAME_CALLS))
                else:
                    self._fail(CommunicationTimeoutError(f"{what(flag)} in {self.timeout:g} s", next_step=LATE))
                return

    def _flags_of(self, one: WatchedPass) -> list[int] | None:
        """Return this rank's flags during a pass; None if the pass is over, since the next one may set them."""
        with self._looking:
            return self._read() if one in self._passes and not one.over() else None

    def _fail(self, error: CommunicationError) -> None:
        """Report an error, and let the streams of this pass and of all queued passes finish."""
        self.failed = error
        print(f"burst_portable: {error}", file=sys.stderr, flush=True)
        while (one := self._next()) is not None:
            self._release([(flag, mark) for flag, mark, _ in one.expected])
            until = time.monotonic() + _RELEASE_SECONDS
            while not one.over() and time.monotonic() < until and self._pause(self._every / 10):
                self._release([(flag, mark) for flag, mark, _ in one.expected])  # the host may still be adding flags


def _ahead(found: int, mark: int) -> bool:
    """Return whether a flag belongs to a later pass than the mark: its peer has completed this pass."""
    return found > 0 and 0 < ((found >> _NUMBER) - (mark >> _NUMBER)) % (MARKS - 1) < _MOST_AHEAD
