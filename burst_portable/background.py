"""Threads that work in the background, and end before the interpreter does.

A thread that comes back from C++ while the interpreter is finalised is ended by Python in the middle of torch's frames,
which allow no exception: the process dies with SIGABRT after all its work was done. Daemon threads do not help, they
are what this happens to. So each is told to stop at exit, and joined.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable
from queue import SimpleQueue
from typing import Generic, TypeVar

Owner = TypeVar("Owner")

_PATIENCE = 5.0  # seconds for a call into torch to come back; one that does not is left to its fate


class Background(Generic[Owner]):
    """A thread that does its owner's work whenever it is woken, until it is stopped, its owner is gone, or at exit.

    It holds its owner only while it works, so an owner with nothing to do can be collected, and the thread with it.

    Args:
        owner: whom it works for.
        work: called with the owner; returns when there is nothing to do, or as soon as `pause` says so. A function of
            the owner's class, not a bound method, which would keep the owner.
        name: the thread's.
    """

    def __init__(self, owner: Owner, work: Callable[[Owner], None], name: str) -> None:
        self._work = work
        self._calls: SimpleQueue[Owner | None] = SimpleQueue()  # may be put to while an owner is being collected
        self._told = threading.Event()
        self._process = os.getpid()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()
        self.stop = weakref.finalize(owner, self._end)
        """Wait for the thread to end, a few seconds at most; the first call does it, at exit at the latest."""

    def wake(self, owner: Owner) -> None:
        """There is work for the owner."""
        self._calls.put(owner)

    def pause(self, seconds: float) -> bool:
        """Wait within the work; whether to go on with it."""
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
            return  # a fork has no such thread, and the locks of one for ever
        self._told.set()
        self._calls.put(None)
        if threading.current_thread() is not self._thread:  # which may be the one that lets go of the owner
            self._thread.join(_PATIENCE)
