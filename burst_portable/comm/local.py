"""Ranks as threads of one process: for tests, notebooks, and plans that want to be seen running.

    results = run_ranks(4, lambda mesh: ...)      # one result a rank

A rank that raises ends the others at their next hop, and its own error is the one that is raised.
"""

from __future__ import annotations

import contextvars
import queue
import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import TypeVar

from torch import Tensor

from burst_portable.comm.base import Handle, Message, Transport
from burst_portable.errors import DeadlineError, InputError, MismatchError, PeerLostError, explain

T = TypeVar("T")
_POLL = 0.05  # seconds between looks at whether a peer has failed


class Fabric:
    """What the threads share: a queue for every pair of ranks."""

    def __init__(self, size: int, deadline: float) -> None:
        self.size, self.deadline = size, deadline
        self.failed: int | None = None
        self.sent: dict[int, int] = defaultdict(int)
        self._lock = threading.Lock()
        self._queues: dict[tuple[int, int], queue.SimpleQueue[Tensor]] = defaultdict(queue.SimpleQueue)

    def queue(self, source: int, target: int) -> queue.SimpleQueue[Tensor]:
        """The messages on their way between two ranks, in order."""
        with self._lock:
            return self._queues[source, target]

    def count(self, rank: int, size: int) -> None:
        """Bytes that a rank has sent, for those who compare them with the plan."""
        with self._lock:
            self.sent[rank] += size

    def fail(self, rank: int) -> None:
        """A rank is gone: the others stop waiting."""
        with self._lock:
            if self.failed is None:
                self.failed = rank


class _Done:
    def wait(self) -> None:
        pass


class _Arrival:
    def __init__(self, transport: LocalTransport, message: Message, label: str) -> None:
        self._transport, self._message, self._label = transport, message, label

    def wait(self) -> None:
        fabric, rank, peer = self._transport.fabric, self._transport.rank, self._message.peer
        source = fabric.queue(peer, rank)
        waited = 0.0
        while True:
            try:
                data = source.get(timeout=_POLL)
                break
            except queue.Empty:
                waited += _POLL
            if fabric.failed is not None:
                raise PeerLostError(f"rank {rank}, {self._label}: rank {fabric.failed} failed, waiting for rank {peer}")
            if waited >= fabric.deadline:
                raise DeadlineError(
                    explain(
                        f"rank {rank}, {self._label}: nothing came from rank {peer} in {fabric.deadline:g} s",
                        next_step="find out what that rank is doing, or raise the deadline",
                    )
                )
        if data.numel() != self._message.buffer.numel():
            raise MismatchError(
                explain(
                    f"rank {rank}, {self._label}: rank {peer} sent a message of another size",
                    got=f"{data.numel()} bytes",
                    allowed=f"{self._message.buffer.numel()}",
                    next_step="all ranks must make the same call",
                )
            )
        self._message.buffer.copy_(data)


class LocalTransport(Transport):
    """See `comm.base.Transport`. A message is copied when it is sent, and again when it arrives."""

    name = "local"

    def __init__(self, fabric: Fabric, rank: int) -> None:
        self.fabric, self.rank, self.size = fabric, rank, fabric.size

    def post(
        self, sends: Sequence[Message], receives: Sequence[Message], label: str = ""
    ) -> tuple[list[Handle], list[Handle]]:
        for buffer, peer in sends:
            self.fabric.count(self.rank, buffer.numel())
            self.fabric.queue(self.rank, peer).put(buffer.clone())
        return [_Done() for _ in sends], [_Arrival(self, message, label) for message in receives]


def run_threads(ranks: int, work: Callable[[LocalTransport], T], *, deadline: float = 60.0) -> list[T]:
    """Run `work(transport)` on so many threads; the results in rank order. Context variables are copied.

    Raises what the first failing rank raised.
    """
    if ranks < 1:
        raise InputError(explain("local ranks must be at least 1", got=ranks))
    fabric = Fabric(ranks, deadline)
    results: dict[int, T] = {}
    errors: list[tuple[int, BaseException]] = []

    def body(rank: int) -> None:
        try:
            results[rank] = work(LocalTransport(fabric, rank))
        except BaseException as error:  # noqa: BLE001  (handed to the caller below)
            errors.append((rank, error))
            fabric.fail(rank)

    threads = []
    for rank in range(ranks):
        context = contextvars.copy_context()
        threads.append(threading.Thread(target=context.run, args=(body, rank), name=f"rank {rank}", daemon=True))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0][1]
    return [results[rank] for rank in range(ranks)]
