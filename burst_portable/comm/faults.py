"""Watch for transfers that never end, in a thread, for NCCL, RCCL and HCCL, where the device waits for them.

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
from time import monotonic
from typing import Protocol

import torch.distributed as dist
from torch import Tensor

from burst_portable.errors import LATE, CommunicationTimeoutError
from burst_portable.utils.text import rank_names
from burst_portable.utils.threads import Background

_PATIENCE = 2.0  # seconds: for notes of others, and for a store whose host may be the rank that is gone
_POLL = 0.05  # seconds between looks for notes
_LONGEST = 400  # characters of a note
_MOST = 8  # notes that an error shows


def exchange_error_notes(group: dist.ProcessGroup, mine: str) -> str:
    """Leave the note `mine` for the other ranks of the group. Return their notes in one line, and who left none.

    Takes a few seconds at most. Returns "" if the store cannot be reached, or the group has one rank.
    """
    try:
        ranks = dist.get_process_group_ranks(group)
    except KeyError:  # torch has forgotten it
        return "this rank has destroyed the process group: make a new Mesh of an existing one"
    note = f"{mine[:_LONGEST]} [group {group.group_name}: {rank_names(ranks)}]"
    notes = NoteExchange(ranks, note)
    # A store blocks for minutes if its host is stopped. The notes that have been read by then are used.
    notes.thread.wake(notes)
    notes.over.wait(_PATIENCE + 1)
    told = notes.told
    if not told:
        return ""
    others = [(r, told.get(global_rank, "")) for r, global_rank in enumerate(ranks) if global_rank != dist.get_rank()]
    heard = [text for _, text in others if text][:_MOST]
    silent = [r for r, text in others if not text]
    return "; ".join([*heard, *([f"nothing is heard of {rank_names(silent)}"] if silent else [])])


class NoteExchange:
    """Leaves this rank's note in the store, and fills `told` with the notes of all ranks, by global rank.

    `poll` is the time in seconds between looks at the store.
    """

    def __init__(self, ranks: list[int], text: str, *, poll: float = _POLL) -> None:
        self._ranks, self._text, self._poll = ranks, text, poll
        self.told: dict[int, str] = {}
        self.over = threading.Event()
        self.thread = Background(self, NoteExchange.run, "accounts of a fault")

    def run(self) -> None:
        """Read notes until all ranks have left one or the time is over."""
        try:
            if (world := dist.group.WORLD) is not None:  # else this rank has left the group by now
                self._ask(world.get_group_store(), dist.get_rank())
        except RuntimeError:  # DistStoreError and the like: the store went away with its host
            return
        finally:
            self.over.set()

    def _ask(self, store: dist.Store, mine: int) -> None:
        keys = {rank: f"burst_portable/account/{rank}" for rank in self._ranks}
        until = monotonic() + _PATIENCE
        store.set(keys[mine], self._text)
        self.told[mine] = self._text
        while len(self.told) < len(keys) and monotonic() < until:
            for rank in self._ranks:
                if rank not in self.told and store.check([keys[rank]]):
                    self.told[rank] = store.get(keys[rank]).decode(errors="replace")
            if not self.thread.pause(self._poll):
                return


EVERY = 0.2
"""Default seconds between looks."""


class _Event(Protocol):
    def query(self) -> bool: ...


class _Work(Protocol):
    def is_completed(self) -> bool: ...


@dataclass(eq=False)
class _Hop:
    """Transfers of one post. `ready` is recorded just before them on the device; None while the host starts them."""

    what: str
    ready: _Event | None
    works: Sequence[_Work] = ()
    incoming: Sequence[Tensor] = ()
    since: float | None = None  # when it was first seen to be under way

    def over(self) -> bool:
        return self.ready is not None and all(work.is_completed() for work in self.works)


class HopWatch:
    """Watches the transfers of one rank of a group.

    Args:
        timeout: seconds that a transfer may take.
        settle: fills what was to be received with NaN and aborts the group; called in the watch's thread.
        prepare: called first in that thread, if given.
        every: Seconds between looks.
    """

    def __init__(
        self,
        timeout: float,
        settle: Callable[[Sequence[Tensor]], None],
        prepare: Callable[[], None] | None = None,
        *,
        every: float = EVERY,
    ) -> None:
        self.failed: CommunicationTimeoutError | None = None
        self._timeout, self._settle, self._prepare = timeout, settle, prepare
        self._every = every
        self._hops: deque[_Hop] = deque()
        self._awake = False  # whether the thread is at work and will see new transfers without being woken
        self._lock = threading.Lock()
        self._thread: Background[HopWatch] | None = None

    def starting(self, what: str, incoming: Sequence[Tensor]) -> _Hop:
        """Watch transfers that the host is about to start, which may block if a peer is gone.

        Finished transfers are also released here. Until then their buffers could not be reused, and the call would need
        more memory.
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
        """Forget transfers that could not be started. The caller raises that error."""
        with self._lock:
            self._hops.remove(hop)

    # ------------------------------------------------------------------------------------------ the thread

    def _watch(self) -> None:
        """Watch until no transfer is active."""
        if self._prepare is not None:
            self._prepare()
            self._prepare = None
        assert self._thread is not None, "this is the thread"
        while self._goes_on() and self._thread.pause(min(self._every, self._timeout / 4)):
            late = self._look()
            if late is not None:
                self._fail(late.what)

    def _goes_on(self) -> bool:
        """Return whether there are transfers to watch. If not, the thread sleeps until the next transfer wakes it."""
        with self._lock:
            self._awake = bool(self._hops) and self.failed is None
            return self._awake

    def _let_go(self) -> None:
        while self._hops and self._hops[0].over():
            self._hops.popleft()

    def _look(self) -> _Hop | None:
        """Release finished transfers. Return the first transfer if it has taken too long, else None."""
        with self._lock:
            self._let_go()
            if not self._hops or not (self._hops[0].ready is None or self._hops[0].ready.query()):
                return None
            first = self._hops[0]
            first.since = time.monotonic() if first.since is None else first.since
            return first if time.monotonic() - first.since >= self._timeout else None

    def _fail(self, what: str) -> None:
        self.failed = CommunicationTimeoutError(
            f"{what} took too long",
            got=f"nothing in {self._timeout:g} s",
            next_step=LATE,
        )
        print(f"burst_portable: {self.failed}", file=sys.stderr, flush=True)
        self._settle([buffer for hop in tuple(self._hops) for buffer in hop.incoming])
