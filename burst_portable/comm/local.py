"""Run ranks as threads of one process: for tests, notebooks, and watching plans run.

    results = run_transports(4, lambda transport: ...)      # one result per rank

A rank that raises ends the other ranks at their next message, and its error is raised. A rank that returns while other
ranks wait for it ends them too.
"""

from __future__ import annotations

import contextvars
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from typing import TypeVar

from torch import Tensor

from burst_portable.comm.base import Handle, Message, Transport
from burst_portable.errors import (
    LATE,
    SAME_CALLS,
    CommunicationError,
    CommunicationTimeoutError,
    InputError,
    MismatchError,
    PeerLostError,
)
from burst_portable.utils.text import rank_names

T = TypeVar("T")
_POLL = 0.05  # seconds between looks at whether a peer has failed
_LAST_WORDS = 3.0  # seconds that ranks get to finish after Ctrl-C


class Transfer:
    """One message between two ranks, made when the first of them posts it. Both wait for the same object."""

    def __init__(self, source: int, target: int, buffer: Tensor) -> None:
        self.source, self.target = source, target
        self.buffer: Tensor | None = buffer
        self.done = threading.Event()
        self.mismatch = ""

    def meet(self, buffer: Tensor, *, sends: bool) -> None:
        """Copy, now that the second end has posted its buffer."""
        assert self.buffer is not None
        sent, received = (buffer, self.buffer) if sends else (self.buffer, buffer)
        # The handle of the slower end must not keep the memory of the faster one.
        self.buffer = None
        if sent.numel() == received.numel():
            received.copy_(sent)
        else:
            sizes = f"{sent.numel()} bytes, rank {self.target} waits for {received.numel()}"
            self.mismatch = f"rank {self.source} sends {sizes}"
        self.done.set()


class Fabric:
    """Shared by the threads: for every pair of ranks, the messages that only one of them has posted, in order."""

    def __init__(self, size: int, timeout: float) -> None:
        self.size, self.timeout = size, timeout
        self.failed: int | None = None
        self.returned: set[int] = set()
        self.sent: dict[int, int] = defaultdict(int)
        self._lock = threading.Lock()
        self._said: dict[int, tuple[threading.Event, dict[int, bytes]]] = {}
        self._waiting: dict[tuple[int, int, bool], deque[Transfer]] = defaultdict(deque)

    def post(self, source: int, target: int, buffer: Tensor, *, sends: bool) -> Transfer:
        """Post one end of a message; the rank that posts second copies."""
        with self._lock:
            self.sent[source] += buffer.numel() if sends else 0
            other = self._waiting[source, target, not sends]
            if not other:
                transfer = Transfer(source, target, buffer)
                self._waiting[source, target, sends].append(transfer)
                return transfer
            transfer = other.popleft()
        transfer.meet(buffer, sends=sends)
        return transfer

    def share(self, rank: int, turn: int, data: bytes) -> tuple[threading.Event, dict[int, bytes]]:
        """Share data at this turn. Return (an event that is set when all ranks have shared, the data by rank)."""
        with self._lock:
            event, said = self._said.setdefault(turn, (threading.Event(), {}))
            said[rank] = data
            if len(said) == self.size:
                del self._said[turn]
                event.set()
        return event, said

    def wait(self, event: threading.Event, where: str, missing: Callable[[], list[int]], seconds: float) -> None:
        """Wait for an event. Raises if a rank fails or returns, or at the timeout. `missing` returns late ranks."""
        until = time.monotonic() + seconds
        while not event.wait(_POLL):
            if self.failed is not None:
                raise PeerLostError(f"{where}: rank {self.failed} failed, waiting for {rank_names(missing())}")
            gone = self.returned and self.returned.intersection(missing())
            if gone and not event.is_set():  # whatever it did, it did before it returned
                raise PeerLostError(
                    f"{where}: {rank_names(sorted(gone))} returned without this call",
                    next_step=SAME_CALLS,
                )
            if time.monotonic() >= until:
                raise CommunicationTimeoutError(
                    f"{where}: nothing came from {rank_names(missing())} in {seconds:g} s",
                    next_step=LATE,
                )

    def fail(self, rank: int) -> None:
        """Record that a rank has failed, which ends the waits of the others."""
        with self._lock:
            if self.failed is None:
                self.failed = rank


class _End:
    """A rank's handle on a transfer."""

    def __init__(self, fabric: Fabric, transfer: Transfer, rank: int, label: str) -> None:
        self._fabric, self._transfer = fabric, transfer
        self._peer = transfer.source if rank == transfer.target else transfer.target
        self._where = f"rank {rank}, {label}"

    def wait(self) -> None:
        self._fabric.wait(self._transfer.done, self._where, lambda: [self._peer], self._fabric.timeout)
        if self._transfer.mismatch:
            raise MismatchError(
                f"{self._where}: the message has another size on the other rank",
                got=self._transfer.mismatch,
                next_step="all ranks must make the same call",
            )


class LocalTransport(Transport):
    """See `comm.base.Transport`. A message is copied once, from buffer to buffer."""

    persistent_inbox = True

    def __init__(self, fabric: Fabric, rank: int) -> None:
        super().__init__("local", rank, fabric.size)
        self.fabric = fabric
        self._turn = 0

    def share(self, data: bytes, label: str = "share", timeout: float | None = None) -> list[bytes]:
        self._turn += 1
        event, said = self.fabric.share(self.rank, self._turn, data)
        where = f"rank {self.rank}, {label}"

        def missing() -> list[int]:
            return [rank for rank in range(self.size) if rank not in said]

        self.fabric.wait(event, where, missing, self.fabric.timeout if timeout is None else timeout)
        return [said[rank] for rank in range(self.size)]

    def post(
        self, sends: Sequence[Message], receives: Sequence[Message], label: str = ""
    ) -> tuple[list[Handle], list[Handle]]:
        def end(transfer: Transfer) -> Handle:
            return _End(self.fabric, transfer, self.rank, label)

        incoming, outgoing = [], []
        for m in receives:
            incoming.append(end(self.fabric.post(m.peer, self.rank, m.buffer, sends=False)))
        for m in sends:
            outgoing.append(end(self.fabric.post(self.rank, m.peer, m.buffer, sends=True)))
        return outgoing, incoming


def run_transports(ranks: int, work: Callable[[LocalTransport], T], *, timeout: float = 60.0) -> list[T]:
    """Run `work(transport)` on this many threads; returns results in rank order. Context variables are copied.

    Raises what the first failing rank raised; a communication error only if there is no other.
    """
    if ranks < 1:
        raise InputError("too few local ranks", got=ranks, allowed="at least 1")
    fabric = Fabric(ranks, timeout)
    results: dict[int, T] = {}
    errors: list[tuple[int, BaseException]] = []
    over: list[threading.Event] = []  # for each rank that was started

    def body(rank: int) -> None:
        try:
            results[rank] = work(LocalTransport(fabric, rank))
            fabric.returned.add(rank)
        except BaseException as error:  # noqa: BLE001  (handed to the caller below)
            errors.append((rank, error))
            fabric.fail(rank)
        finally:
            over[rank].set()

    threads = []
    for rank in range(ranks):
        context = contextvars.copy_context()
        threads.append(threading.Thread(target=context.run, args=(body, rank), name=f"rank {rank}", daemon=True))
    try:
        for thread in threads:
            over.append(threading.Event())
            thread.start()
        for thread in threads:
            thread.join()
    except BaseException:  # Ctrl-C: a rank that is still at work when Python ends would abort the process
        fabric.fail(0)
        until = time.monotonic() + _LAST_WORDS
        for event in over:  # not thread.join: a thread that is just starting is not alive yet
            event.wait(max(0.0, until - time.monotonic()))
        raise
    if errors:
        # A rank's own error explains more than those that other ranks raised because of it.
        raise min(errors, key=lambda error: isinstance(error[1], CommunicationError))[1]
    return [results[rank] for rank in range(ranks)]
