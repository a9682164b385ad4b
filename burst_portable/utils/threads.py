"""Define threads that work in the background and end before the interpreter does.

If a daemon thread returns from C++ while the interpreter is finalized, Python ends it inside torch's frames. These
allow no exception, so the process dies with SIGABRT after all its work was done. Therefore each thread is stopped and
joined at exit.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable
from queue import SimpleQueue
from typing import Generic, TypeVar

Owner = TypeVar("Owner")

_JOIN_TIMEOUT = 5.0  # seconds for a call into torch to return; after that the thread is abandoned


class Background(Generic[Owner]):
    """A thread that works for its owner when it is woken, until it is stopped, its owner is collected, or at exit.

    It has a reference to its owner only while it works, so that an idle owner can be collected, which ends the thread.

    Args:
        owner: The object for which it works.
        work: Function that is called with the owner. It returns when there is nothing to do, or as soon as `pause`
            returns false. Must not be a bound method, which would keep the owner alive.
        name: Name of the thread.
    """

    def __init__(self, owner: Owner, work: Callable[[Owner], None], name: str) -> None:
        self._work = work
        self._calls: SimpleQueue[Owner | None] = SimpleQueue()  # reentrant: the owner may be collected during a put
        self._stopped = threading.Event()
        self._process = os.getpid()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()
        self.stop = weakref.finalize(owner, self._end)
        """Stop the thread and wait up to `_JOIN_TIMEOUT` seconds for its end. Called at exit at the latest."""

    def wake(self, owner: Owner) -> None:
        """Let the thread call `work` with the owner."""
        self._calls.put(owner)

    def pause(self, seconds: float) -> bool:
        """Sleep inside `work` and return whether to continue."""
        return not self._stopped.wait(seconds)

    def _run(self) -> None:
        while (owner := self._calls.get()) is not None:
            self._work(owner)
            del owner  # while the thread sleeps, the owner can be collected

    def _end(self) -> None:
        if os.getpid() != self._process:
            return  # a forked child has no such thread, only its locks, which are never released
        self._stopped.set()
        self._calls.put(None)
        if threading.current_thread() is not self._thread:  # the thread itself may release the last reference
            self._thread.join(_JOIN_TIMEOUT)
