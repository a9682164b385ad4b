"""Report transfers that never end, on process groups whose device waits for them (NCCL, RCCL, HCCL).

torch's own watchdog ends the process after the group's timeout and reports only the number of an operation. The watch
here is a thread that measures from the time at which the device could have begun a transfer. At the timeout it prints
rank, step and peers to standard error, fills the receive buffers with NaN, and aborts the group to end its kernels.
The next transfer that this rank starts raises an error.
"""

from __future__ import annotations

import sys
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import monotonic

import torch
import torch.distributed as dist
from torch import Tensor

from burst_portable.errors import LATE, CommunicationTimeoutError
from burst_portable.utils.text import rank_names
from burst_portable.utils.threads import Background

_NOTE_SECONDS = 2.0  # to wait for notes of other ranks; the store may have been on the lost rank
_POLL = 0.05  # seconds between reads of the store
_NOTE_LENGTH = 400  # characters
_SHOWN_NOTES = 8  # in an error


def exchange_error_notes(group: dist.ProcessGroup, text: str) -> str:
    """Store this rank's error text for the other ranks. Return their texts in one line, and the ranks without one.

    Takes a few seconds at most. Returns "" if the store cannot be reached, or the group has one rank.
    """
    try:
        ranks = dist.get_process_group_ranks(group)
    except KeyError:  # torch has forgotten it
        return "this rank has destroyed the process group: make a new Mesh of an existing one"
    note = f"{text[:_NOTE_LENGTH]} [group {group.group_name}: {rank_names(ranks)}]"
    notes = NoteExchange(ranks, note)
    # A store blocks for minutes if its host is stopped. Then only the notes that were read so far are used.
    notes.thread.wake(notes)
    notes.over.wait(_NOTE_SECONDS + 1)
    found = notes.notes
    if not found:
        return ""
    others = [(r, found.get(global_rank, "")) for r, global_rank in enumerate(ranks) if global_rank != dist.get_rank()]
    texts = [text for _, text in others if text][:_SHOWN_NOTES]
    missing = [r for r, text in others if not text]
    return "; ".join([*texts, *([f"no report from {rank_names(missing)}"] if missing else [])])


class NoteExchange:
    """Write this rank's note to the store, and read the notes of all ranks into `notes`, by global rank.

    `poll`: seconds between reads of the store.
    """

    def __init__(self, ranks: list[int], text: str, *, poll: float = _POLL) -> None:
        self._ranks, self._text, self._poll = ranks, text, poll
        self.notes: dict[int, str] = {}
        self.over = threading.Event()
        self.thread = Background(self, NoteExchange.run, "error notes")

    def run(self) -> None:
        """Read notes until all ranks have written one or the time is over."""
        try:
            if (world := dist.group.WORLD) is None:
                return  # this rank has destroyed its groups
            store, rank, until = world.get_group_store(), dist.get_rank(), monotonic() + _NOTE_SECONDS
            keys = {rank: f"burst_portable/account/{rank}" for rank in self._ranks}
            store.set(keys[rank], self._text)
            self.notes[rank] = self._text
            while len(self.notes) < len(keys) and monotonic() < until:
                for other in self._ranks:
                    if other not in self.notes and store.check([keys[other]]):
                        self.notes[other] = store.get(keys[other]).decode(errors="replace")
                if not self.thread.pause(self._poll):
                    return
        except RuntimeError:  # DistStoreError and the like: the store went away with its host
            return
        finally:
            self.over.set()


EVERY = 0.2
"""Default seconds between checks."""


@dataclass(eq=False)
class _Post:
    """Transfers of one post. `ready` is recorded just before them on the device; None while the host starts them."""

    what: str
    ready: torch.Event | None
    works: Sequence[dist.Work] = ()
    incoming: Sequence[Tensor] = ()
    since: float | None = None  # time at which it was first seen in flight

    def is_complete(self) -> bool:
        return self.ready is not None and all(work.is_completed() for work in self.works)


class TransferWatch:
    """Watch the transfers of one rank of a group, each of which may take `timeout` seconds.

    The thread of the watch first calls `prepare`, checks each `every` seconds, and calls `abort` with the receive
    buffers, to fill them with NaN and abort the group.
    """

    def __init__(
        self,
        timeout: float,
        abort: Callable[[Sequence[Tensor]], None],
        prepare: Callable[[], None] | None = None,
        *,
        every: float = EVERY,
    ) -> None:
        self.failed: CommunicationTimeoutError | None = None
        self._timeout, self._abort, self._prepare = timeout, abort, prepare
        self._every = every
        self._posts: deque[_Post] = deque()
        self._awake = False  # whether the thread will see new transfers without being woken
        self._lock = threading.Lock()
        self._thread: Background[TransferWatch] | None = None

    def add(self, what: str, incoming: Sequence[Tensor]) -> _Post:
        """Add transfers that the host is about to start. Starting them may block if a peer is lost.

        Also releases finished transfers, so that their buffers can be reused.
        """
        if self.failed is not None:
            raise self.failed
        post = _Post(what, None, incoming=incoming)
        if self._thread is None:
            self._thread = Background(self, TransferWatch._watch, "burst_portable transfer watch")
        with self._lock:
            self._release_finished()
            self._posts.append(post)
            asleep, self._awake = not self._awake, True
        if asleep:
            self._thread.wake(self)
        return post

    def remove(self, post: _Post) -> None:
        """Remove transfers that could not be started. The caller raises that error."""
        with self._lock:
            self._posts.remove(post)

    # ------------------------------------------------------------------------------------------ the thread

    def _watch(self) -> None:
        """Watch until no transfer is active."""
        if self._prepare is not None:
            self._prepare()
            self._prepare = None
        assert self._thread is not None, "this is the thread"
        while self._has_posts() and self._thread.pause(min(self._every, self._timeout / 4)):
            if (late := self._find_late()) is not None:
                wrong = f"{late.what} took too long"
                self.failed = CommunicationTimeoutError(wrong, got=f"nothing in {self._timeout:g} s", next_step=LATE)
                print(f"burst_portable: {self.failed}", file=sys.stderr, flush=True)
                self._abort([buffer for post in tuple(self._posts) for buffer in post.incoming])

    def _has_posts(self) -> bool:
        """Return whether there are transfers to watch. If not, the thread sleeps until `add` wakes it."""
        with self._lock:
            self._awake = bool(self._posts) and self.failed is None
            return self._awake

    def _release_finished(self) -> None:
        while self._posts and self._posts[0].is_complete():
            self._posts.popleft()

    def _find_late(self) -> _Post | None:
        """Release finished transfers. Return the first remaining one if it has taken too long, else None."""
        with self._lock:
            self._release_finished()
            if not self._posts or not (self._posts[0].ready is None or self._posts[0].ready.query()):
                return None
            first = self._posts[0]
            first.since = monotonic() if first.since is None else first.since
            return first if monotonic() - first.since >= self._timeout else None
