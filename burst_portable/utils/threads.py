"""Threads that work in the background, and end before the interpreter does.

If a thread returns from C++ while the interpreter is being finalised, Python ends it in the middle of torch's frames,
which allow no exception: the process dies with SIGABRT after all its work was done. Daemon threads are the ones that
this happens to. So each thread is told to stop at exit, and joined.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable
from queue import SimpleQueue
from typing import Generic, TypeVar

Owner = TypeVar("Owner")

_PATIENCE = 5.0  # seconds for a call into torch to return; after that the thread is abandoned


class Background(Generic[Owner]):
    """A thread that works for its owner whenever it is woken, until it is stopped, its owner is gone, or at exit.

    It refers to its owner only while it works, so an idle owner can be collected, which ends the thread.

    Args:
        owner: whom it works for.
        work: called with the owner; returns when there is nothing to do, or as soon as `pause` is false. A function of
            the owner's class, not a bound method, which would keep the owner alive.
        name: the thread's name.
    """

    def __init__(self, owner: Owner, work: Callable[[Owner], None], name: str) -> None:
        self._work = work
        self._calls: SimpleQueue[Owner | None] = SimpleQueue()  # reentrant: the owner may be collected during a put
        self._told = threading.Event()
        self._process = os.getpid()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()
        self.stop = weakref.finalize(owner, self._end)
        """Stop the thread and wait a few seconds at most for it to end; called at exit at the latest."""

    def wake(self, owner: Owner) -> None:
        """Let the thread call `work` with the owner."""
        self._calls.put(owner)

    def pause(self, seconds: float) -> bool:
        """Sleep inside `work`; returns whether to continue."""
        return not self._told.wait(seconds)

    def _run(self) -> None:
        while self._turn():
            pass

    def _turn(self) -> bool:
        owner = self._calls.get()
        if owner is None:
            return False
        self._work(owner)
        return True

    def _end(self) -> None:
        if os.getpid() != self._process:
            return  # a forked child has no such thread, only its locks, held for ever
        self._told.set()
        self._calls.put(None)
        if threading.current_thread() is not self._thread:  # the thread itself may drop the last reference
            self._thread.join(_PATIENCE)
