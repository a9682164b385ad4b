"""Run ranks as threads of one process, for tests, notebooks, and to watch plans run.

    results = run_transports(4, lambda transport: ...)      # one result per rank

If a rank raises, or returns while other ranks wait for it, the waits of the other ranks end with an error. The error of
the rank that raised is raised to the caller.
"""

from __future__ import annotations

import contextvars
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from typing import TypeVar

from torch import Tensor

from burst_portable.comm.base import Handle, Handles, Message, Transport
from burst_portable.errors import (
    LATE,
    SAME_CALLS,
    CommunicationError,
    CommunicationTimeoutError,
    MismatchError,
    PeerLostError,
)
from burst_portable.utils.text import rank_names

T = TypeVar("T")
_POLL = 0.05  # seconds between checks whether a peer has failed
_GRACE_SECONDS = 3.0  # for ranks to finish after Ctrl-C


class Transfer:
    """One message between two ranks. The first rank that posts it makes this object, and both wait for it."""

    def __init__(self, source: int, target: int, buffer: Tensor) -> None:
        self.source, self.target = source, target
        self.buffer: Tensor | None = buffer
        self.done = threading.Event()
        self.mismatch = ""

    def complete(self, buffer: Tensor, *, sends: bool) -> None:
        """Copy the message, after the second rank has posted its buffer."""
        assert self.buffer is not None
        sent, received = (buffer, self.buffer) if sends else (self.buffer, buffer)
        # The handle of the slower rank must not keep the memory of the faster one.
        self.buffer = None
        if sent.numel() == received.numel():
            received.copy_(sent)
        else:
            sizes = f"{sent.numel()} bytes, rank {self.target} waits for {received.numel()}"
            self.mismatch = f"rank {self.source} sends {sizes}"
        self.done.set()


class Fabric:
    """State that the threads share: for every pair of ranks, the messages that only one has posted, in order."""

    def __init__(self, size: int, timeout: float) -> None:
        self.size, self.timeout = size, timeout
        self.failed: int | None = None
        self.returned: set[int] = set()
        self.sent: dict[int, int] = defaultdict(int)
        self._lock = threading.Lock()
        self._shared: dict[int, tuple[threading.Event, dict[int, bytes]]] = {}
        self._waiting: dict[tuple[int, int, bool], deque[Transfer]] = defaultdict(deque)

    def post(self, source: int, target: int, buffer: Tensor, *, sends: bool) -> Transfer:
        """Post a send or a receive of a message. The rank that posts second copies it."""
        with self._lock:
            self.sent[source] += buffer.numel() if sends else 0
            posted = self._waiting[source, target, not sends]
            if not posted:
                transfer = Transfer(source, target, buffer)
                self._waiting[source, target, sends].append(transfer)
                return transfer
            transfer = posted.popleft()
        transfer.complete(buffer, sends=sends)
        return transfer

    def share(self, rank: int, turn: int, data: bytes) -> tuple[threading.Event, dict[int, bytes]]:
        """Share data at this turn. Return (an event that is set when all ranks have shared, the data by rank)."""
        with self._lock:
            event, shared = self._shared.setdefault(turn, (threading.Event(), {}))
            shared[rank] = data
            if len(shared) == self.size:
                del self._shared[turn]
                event.set()
        return event, shared

    def wait(self, event: threading.Event, where: str, missing: Callable[[], list[int]], seconds: float) -> None:
        """Wait for an event. Raise if a rank fails or returns, or at the timeout. `missing` returns the late ranks."""
        until = time.monotonic() + seconds
        while not event.wait(_POLL):
            if self.failed is not None:
                raise PeerLostError(f"{where}: rank {self.failed} failed, waiting for {rank_names(missing())}")
            returned = self.returned and self.returned.intersection(missing())
            if returned and not event.is_set():  # a rank that returned can no longer set it
                wrong = f"{where}: {rank_names(sorted(returned))} returned without this call"
                raise PeerLostError(wrong, next_step=SAME_CALLS)
            if time.monotonic() >= until:
                wrong = f"{where}: nothing received from {rank_names(missing())} in {seconds:g} s"
                raise CommunicationTimeoutError(wrong, next_step=LATE)

    def fail(self, rank: int) -> None:
        """Record that a rank has failed, which ends the waits of the other ranks."""
        with self._lock:
            if self.failed is None:
                self.failed = rank


class _TransferHandle:
    """Handle of one rank on a transfer."""

    def __init__(self, fabric: Fabric, transfer: Transfer, rank: int, label: str) -> None:
        self._fabric, self._transfer = fabric, transfer
        self._peer = transfer.source if rank == transfer.target else transfer.target
        self._where = f"rank {rank}, {label}"

    def wait(self) -> None:
        self._fabric.wait(self._transfer.done, self._where, lambda: [self._peer], self._fabric.timeout)
        if self._transfer.mismatch:
            what, step = "the message has another size on the other rank", "all ranks must make the same call"
            raise MismatchError(f"{self._where}: {what}", got=self._transfer.mismatch, next_step=step)


class LocalTransport(Transport):
    """See `comm.base.Transport`. A message is copied once, from buffer to buffer."""

    keeps_received = True

    def __init__(self, fabric: Fabric, rank: int) -> None:
        super().__init__("local", rank, fabric.size)
        self.fabric = fabric
        self._turn = 0

    def share(self, data: bytes, label: str = "share", timeout: float | None = None) -> list[bytes]:
        self._turn += 1
        event, shared = self.fabric.share(self.rank, self._turn, data)

        def missing() -> list[int]:
            return [rank for rank in range(self.size) if rank not in shared]

        seconds = self.fabric.timeout if timeout is None else timeout
        self.fabric.wait(event, f"rank {self.rank}, {label}", missing, seconds)
        return [shared[rank] for rank in range(self.size)]

    def post(self, sends: Sequence[Message], receives: Sequence[Message], label: str = "") -> Handles:
        def handle(transfer: Transfer) -> Handle:
            return _TransferHandle(self.fabric, transfer, self.rank, label)

        incoming, outgoing = [], []
        for m in receives:
            incoming.append(handle(self.fabric.post(m.peer, self.rank, m.buffer, sends=False)))
        for m in sends:
            outgoing.append(handle(self.fabric.post(self.rank, m.peer, m.buffer, sends=True)))
        return outgoing, incoming


def run_transports(ranks: int, work: Callable[[LocalTransport], T], *, timeout: float = 60.0) -> list[T]:
    """Run `work(transport)` on this many threads, and return the results in rank order. Copies context variables.

    If ranks fail, raises the error of the first one, preferably one that is no `CommunicationError`.
    """
    fabric = Fabric(ranks, timeout)
    results: dict[int, T] = {}
    errors: list[tuple[int, BaseException]] = []
    done: list[threading.Event] = []  # for each rank that was started

    def body(rank: int) -> None:
        try:
            results[rank] = work(LocalTransport(fabric, rank))
            fabric.returned.add(rank)
        except BaseException as error:  # noqa: BLE001  (raised below)
            errors.append((rank, error))
            fabric.fail(rank)
        finally:
            done[rank].set()

    threads = []
    for rank in range(ranks):
        context = contextvars.copy_context()
        threads.append(threading.Thread(target=context.run, args=(body, rank), name=f"rank {rank}", daemon=True))
    try:
        for thread in threads:
            done.append(threading.Event())
            thread.start()
        for thread in threads:
            thread.join()
    except BaseException:  # Ctrl-C: a thread that still runs when Python ends would abort the process
        fabric.fail(0)
        until = time.monotonic() + _GRACE_SECONDS
        for event in done:  # not thread.join: a thread that is just starting is not alive yet
            event.wait(max(0.0, until - time.monotonic()))
        raise
    if errors:
        # The first cause explains more than the communication errors that it caused on other ranks.
        raise min(errors, key=lambda error: isinstance(error[1], CommunicationError))[1]
    return [results[rank] for rank in range(ranks)]
