"""A thread that notices transfers that never end, for NCCL, RCCL and HCCL, where the device waits for them.

torch's own watchdog ends the process after the group's timeout and names the number of an operation. This one counts
from when the device could have begun a transfer, prints rank, step and peers to standard error, fills what was to be
received with NaN, and aborts the group so that its kernels end; the next transfer that this rank starts raises.
"""

from __future__ import annotations

import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from burst_portable.background import Background
from burst_portable.errors import LATE, DeadlineError, explain

_EVERY = 0.2  # seconds between looks


class _Event(Protocol):
    def query(self) -> bool: ...


class _Work(Protocol):
    def is_completed(self) -> bool: ...


@dataclass(eq=False)
class _Hop:
    """Transfers of one post; `ready` is recorded just before them on the device, None while the host starts them."""

    what: str
    ready: _Event | None
    works: Sequence[_Work] = ()
    incoming: Sequence[Tensor] = ()
    since: float | None = None  # when it was first seen to be under way

    def over(self) -> bool:
        return self.ready is not None and all(work.is_completed() for work in self.works)


class HopWatch:
    """Watches over the transfers of one rank of a group.

    Args:
        deadline: seconds that a transfer may take.
        settle: fills what was to be received with NaN and aborts the group; called in the watch's thread.
        prepare: called first in that thread, if given.
    """

    def __init__(
        self,
        deadline: float,
        settle: Callable[[Sequence[Tensor]], None],
        prepare: Callable[[], None] | None = None,
    ) -> None:
        self.failed: DeadlineError | None = None
        self._deadline, self._settle, self._prepare = deadline, settle, prepare
        self._hops: deque[_Hop] = deque()
        self._awake = False  # whether the thread is at work and will see new transfers without being woken
        self._lock = threading.Lock()
        self._thread: Background[HopWatch] | None = None

    def starting(self, what: str, incoming: Sequence[Tensor]) -> _Hop:
        """The host is about to start transfers. The watch begins now, since starting may block if a peer is gone.

        Finished transfers are released here, not only when the thread looks again: until then their buffers could not
        be reused, and the call would need more memory.
        """
        if self.failed is not None:
            raise self.failed
        hop = _Hop(what, None, incoming=incoming)
        if self._thread is None:
            self._thread = Background(self, HopWatch._watch, "burst_portable hop watch")
        with self._lock:
            self._let_go()
            self._hops.append(hop)
            asleep, self._awake = not self._awake, True
        if asleep:
            self._thread.wake(self)
        return hop

    def forget(self, hop: _Hop) -> None:
        """The transfers could not be started; the caller raises that error."""
        with self._lock:
            self._hops.remove(hop)

    # ------------------------------------------------------------------------------------------ the thread

    def _watch(self) -> None:
        """Watch until no transfer is under way."""
        if self._prepare is not None:
            self._prepare()
            self._prepare = None
        assert self._thread is not None, "this is the thread"
        while self._goes_on() and self._thread.pause(min(_EVERY, self._deadline / 4)):
            late = self._look()
            if late is not None:
                self._fail(late.what)

    def _goes_on(self) -> bool:
        """Whether there are transfers to watch. If not, the thread sleeps until the next transfer wakes it."""
        with self._lock:
            self._awake = bool(self._hops) and self.failed is None
            return self._awake

    def _let_go(self) -> None:
        while self._hops and self._hops[0].over():
            self._hops.popleft()

    def _look(self) -> _Hop | None:
        """Release finished transfers. Returns the first transfer if it has been under way for too long, else None."""
        with self._lock:
            self._let_go()
            if not self._hops or not (self._hops[0].ready is None or self._hops[0].ready.query()):
                return None
            first = self._hops[0]
            first.since = time.monotonic() if first.since is None else first.since
            return first if time.monotonic() - first.since >= self._deadline else None

    def _fail(self, what: str) -> None:
        self.failed = DeadlineError(
            explain(
                f"{what} took too long",
                got=f"nothing in {self._deadline:g} s",
                next_step=LATE,
            )
        )
        print(f"burst_portable: {self.failed}", file=sys.stderr, flush=True)
        self._settle([buffer for hop in tuple(self._hops) for buffer in hop.incoming])
