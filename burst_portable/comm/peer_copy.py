"""Send messages by peer copies: the sender writes into the memory of the receiver.

::

    sender                                   receiver
                                             a pass begins: "my inbox is free"         -> every peer
    copy stream: wait until it is free
    copy the message to its offset
    "it has come"                        ->  compute stream: wait; use it where it lies

While a kernel runs, copy engines move the blocks, and no multiprocessor is needed. What all ranks exchange at once has
one flag per pair of ranks, since it is waited for together, and a device may move it in other ways. Both ends know from
the plan where in the inbox a message lies; messages outside of plans lie one after the other in a region for each peer.
A flag holds the mark of its pass, a growing number and a piece of the call's fingerprint, so what is left of an earlier
pass, or comes from another call, is never taken for a message of this one. When numbers start again, the pieces differ.
Each rank sends to the next rank first, so that no link serves two ranks at once.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Protocol
from zlib import crc32

import torch
from torch import Tensor

from burst_portable.comm.base import Exchange, Handle, Message, Part, Parts, Strip, Strips, Transport
from burst_portable.errors import UnsupportedError

MESSAGES = 64
"""Limit of messages from one rank to another in one pass."""
EXCHANGES = 32
"""Limit of exchanges in one pass."""


def flags(size: int) -> int:
    """Return how many flags each of `size` ranks has."""
    return size * (MESSAGES + 1 + EXCHANGES)


def came_flag(peer: int, index: int) -> int:
    """Return the flag that a peer sets when its message of this index has arrived."""
    return peer * MESSAGES + index


def free_flag(size: int, peer: int) -> int:
    """Return the flag that a peer sets when its inbox is free."""
    return size * MESSAGES + peer


def exchange_flag(size: int, index: int, peer: int) -> int:
    """Return the flag that a peer sets when its part of this exchange has arrived."""
    return size * (MESSAGES + 1 + index) + peer


@lru_cache(maxsize=1024)
def exchange_flags(size: int, index: int, peers: tuple[int, ...]) -> tuple[int, ...]:
    """Return the `exchange_flag` of several peers."""
    return tuple(exchange_flag(size, index, peer) for peer in peers)


def peer_of(flag: int, size: int) -> int:
    """Return the peer that sets a flag."""
    return flag // MESSAGES if flag < size * MESSAGES else flag % size


ALIGNMENT = 256
"""Bytes: messages begin at multiples of this."""
MARKS = 1 << 15
"""Passes are numbered from 1 to MARKS - 1, then from 1 again."""


class Watched(Protocol):
    """Describes what a flag is waited for, for the error of a wait past its timeout."""

    def __call__(self, flag: int) -> str: ...


class PeerMemory(Protocol):
    """Memory and flags that every rank of a group can write, and a copy stream.

    Only `reserve` makes the host wait. `copying` selects the copy stream instead of the current one.
    """

    rank: int
    size: int

    def reserve(self, inbox: int) -> None:
        """Give every rank an inbox of this many bytes, and flags set to 0. All ranks ask for the same.

        Earlier memory is given up, even if this raises.
        """

    def inbox(self, offset: int, size: int) -> Tensor:
        """Return bytes of this rank's own inbox."""

    def enter(self) -> None:
        """Begin a pass on the current stream, after the last pass on any stream.

        If the stream cannot have a pass, raises and begins none.
        """

    def leave(self) -> None:
        """End the pass: the next one runs after everything that the current stream has been given so far."""

    def fork(self) -> None:
        """Make the copy stream wait for everything that the current stream has been given so far."""

    def copy(self, leaving: Sequence[Parts | Strips], *, alone: bool) -> None:
        """Copy parts of buffers to their offsets in inboxes, on the copy stream.

        If `alone`, no other kernel runs, so that a kernel may copy. If not, all parts go to other ranks.
        """

    def copy_own(self, leaving: Sequence[Parts | Strips]) -> None:
        """Copy parts that stay on this rank, on the current stream."""

    def sent(self) -> Handle:
        """Return a handle for everything that the copy stream has been given so far."""

    def signal(self, flags: Sequence[tuple[int, int]], mark: int, *, copying: bool) -> None:
        """Set flags, as (peer, flag), once everything that the stream was given before is done."""

    def wait(self, flags: Sequence[int], mark: int, what: Watched, *, copying: bool) -> None:
        """Hold the stream until all these flags of this rank show the mark."""

    def check(self) -> None:
        """Raise what has gone wrong in the meantime, if anything."""

    def close(self) -> None:
        """Release the memory. Collective."""


class PeerCopyTransport(Transport):
    """See `comm.base.Transport`. Messages go by peer copies inside a pass; all else goes through `other`.

    It shares the state of `other`, where other meshes of the group look and a rank that refuses its call answers.

    Args:
        memory: the peer memory of the group's ranks.
        other: a transport of the same ranks, for messages between passes.
    """

    host = False
    direct = True
    supports_strided_sends = True

    def __init__(self, memory: PeerMemory, other: Transport) -> None:
        super().__init__("peer_copy", memory.rank, memory.size, other.state)
        self.memory, self._other = memory, other
        self._region = self._number = self._mark = self._turn = self._exchanges = 0
        self._waited: set[int] = set()
        self._sent_to = _Places(self.size)
        self._coming = _Places(self.size)
        self._handed: dict[int, list[tuple[int, Tensor]]] = defaultdict(list)

    def unfinished(self) -> str:
        return self._other.unfinished()

    def begin(self, digest: bytes = b"", inbox: int = 0) -> None:
        memory = self.memory
        memory.check()
        self.check_in_sync()
        need = -(-(inbox + MESSAGES * ALIGNMENT) // ALIGNMENT) * ALIGNMENT
        if need > self._region:
            self._region = 0  # earlier memory is given up even if no more can be had
            memory.reserve(need * self.size)
            self._region, self._number = need, 0
        memory.enter()  # may raise, and then no pass has begun
        super().begin(digest, inbox)
        self._number = self._number % (MARKS - 1) + 1
        self._turn += self._number == 1
        self._mark = self._number << 16 | crc32(digest, self._turn) & 0xFFFF
        for places in (self._sent_to, self._coming):
            places.clear()
        self._exchanges = 0
        self._waited.clear()
        self._handed.clear()
        free = free_flag(self.size, self.rank)
        memory.signal([(peer, free) for peer in self.others], self._mark, copying=False)

    def end(self) -> None:
        self.memory.leave()
        super().end()

    def inbox(self, size: int, device: torch.device, peer: int, offset: int | None = None) -> Tensor:
        if not self.state.pass_active or not size:
            return self._other.inbox(size, device, peer)
        if offset is not None:
            assert offset + size <= self._region * self.size, "an inbox has room for all messages"
            return self.memory.inbox(offset, size)
        index, start = self._take(self._coming, peer, size)
        buffer = self.memory.inbox(peer * self._region + start, size)
        self._handed[peer].append((index, buffer))
        return buffer

    def buffer(self, size: int, device: torch.device) -> Tensor:
        return self._other.buffer(size, device)

    def post(
        self, sends: Sequence[Message], receives: Sequence[Message], label: str = ""
    ) -> tuple[list[Handle], list[Handle]]:
        if not self.state.pass_active:
            return self._other.post(sends, receives, label)
        self.memory.check()
        incoming: list[Handle] = [self._expect(message, label) for message in receives]
        if not sends:
            return [], incoming
        self.memory.fork()
        for message in sorted(sends, key=lambda m: self._distance(m.peer)):
            self._send(message, label)
        return [self.memory.sent()] * len(sends), incoming

    def exchange(
        self, leaving: Sequence[Parts | Strips], arriving: Sequence[Parts], label: str, *, alone: bool = False
    ) -> Exchange:
        """See `Transport.exchange`. One flag per peer says that all of its buffers have arrived."""
        if not self.state.pass_active or not leaving or leaving[0].parts[0].offset is None:
            return super().exchange(leaving, arriving, label)
        memory, index = self.memory, self._exchanges
        memory.check()
        if index >= EXCHANGES:
            raise self._no_room(f"exchange {index + 1}", f"{EXCHANGES} exchanges")
        self._exchanges += 1
        targets = _peers(leaving)
        mine = exchange_flag(self.size, index, self.rank)
        memory.fork()
        self._wait_for_room(targets, label)
        own: list[Parts | Strips] = []
        if not alone:
            # Multiprocessors make copies within a device. On the copy stream such copies wait for a kernel that
            # occupies them all, and messages wait behind the copies.
            leaving, own = _split(leaving, self.rank)
        memory.copy(leaving, alone=alone)
        memory.signal([(peer, mine) for peer in targets], self._mark, copying=True)
        came = exchange_flags(self.size, index, _peers(arriving))
        return _PeerExchange(memory, own, _Arrivals(memory, came, self._mark, self._missing(label)))

    def share(self, data: bytes, label: str = "share", timeout: float | None = None) -> list[bytes]:
        return self._other.share(data, label, timeout)

    def close(self) -> None:
        self.memory.close()
        self._other.close()

    # ----------------------------------------------------------------------------------------- one message

    def _send(self, message: Message, label: str) -> None:
        memory, peer = self.memory, message.peer
        if message.offset is not None:
            index, offset = self._take(self._sent_to, peer, 0)[0], message.offset
        else:
            index, start = self._take(self._sent_to, peer, message.buffer.numel())
            offset = self.rank * self._region + start
        self._wait_for_room([peer], label)
        memory.copy([Parts(message.buffer, (Part(peer, 0, message.buffer.numel(), offset),))], alone=False)
        memory.signal([(peer, came_flag(self.rank, index))], self._mark, copying=True)

    def _wait_for_room(self, peers: Sequence[int], label: str) -> None:
        """Make the copy stream wait until the inboxes of these peers are free; once per pass for each."""
        new = [peer for peer in peers if peer not in self._waited and peer != self.rank]
        if not new:
            return
        self._waited.update(new)
        what = _Wait(self.rank, self.size, label, "has not made room for the message from here")
        self.memory.wait([free_flag(self.size, peer) for peer in new], self._mark, what, copying=True)

    def _expect(self, message: Message, label: str) -> Handle:
        peer = message.peer
        if message.offset is not None:
            index, inbox = self._take(self._coming, peer, 0)[0], message.buffer
        else:
            if not self._handed[peer]:
                self.inbox(message.buffer.numel(), message.buffer.device, peer)
            index, inbox = self._handed[peer].pop(0)
        assert inbox.numel() == message.buffer.numel(), "buffers from `inbox` are posted in their order"
        flag = came_flag(peer, index)
        return _Arrival(self.memory, flag, self._mark, self._missing(label), inbox, message.buffer)

    def _missing(self, label: str) -> _Wait:
        return _Wait(self.rank, self.size, label, "has not sent its message")

    def _distance(self, peer: int) -> int:
        """Return by how many ranks a peer is ahead."""
        return (peer - self.rank) % self.size

    def _take(self, places: _Places, peer: int, size: int) -> tuple[int, int]:
        """Return (index, offset) of the next message from or to a peer."""
        index, offset = places.next(peer, size)
        if index >= MESSAGES or offset + size > self._region:
            got = f"message {index + 1} of rank {peer}, {offset + size} bytes in all"
            raise self._no_room(got, f"{MESSAGES} messages, {self._region} bytes")
        return index, offset

    def _no_room(self, got: str, allowed: str) -> UnsupportedError:
        return UnsupportedError(
            f"peer copies: rank {self.rank} has no room for another message in this pass",
            got=got,
            allowed=allowed,
            next_step="tell `begin` how many bytes come, or take another transport",
        )


class _PeerExchange(Exchange):
    """Messages between all ranks. If a kernel runs at the same time, a rank copies its own part separately."""

    def __init__(self, memory: PeerMemory, own: Sequence[Parts | Strips], arrivals: _Arrivals) -> None:
        super().__init__([memory.sent()], [arrivals])
        self._memory, self._parts = memory, own

    def copy_own(self) -> None:
        if self._parts:
            self._memory.copy_own(self._parts)


def _split(leaving: Sequence[Parts | Strips], rank: int) -> tuple[list[Parts | Strips], list[Parts | Strips]]:
    """Return (what goes to other ranks, what stays on this one)."""
    sides: tuple[list[Parts | Strips], list[Parts | Strips]] = ([], [])
    for one in leaving:
        for side, parts in zip(sides, _split_parts(one.parts, rank), strict=True):
            if parts:
                side.append(one._replace(parts=parts))
    return sides


@lru_cache(maxsize=1024)
def _split_parts(parts: tuple[Any, ...], rank: int) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    return tuple(part for part in parts if part.peer != rank), tuple(part for part in parts if part.peer == rank)


def _peers(side: Sequence[Parts | Strips]) -> tuple[int, ...]:
    """Return the ranks that one side of an exchange names."""
    peers = _ranks(side[0].parts)
    assert all(_ranks(one.parts) == peers for one in side[1:]), "all buffers have parts for the same ranks"
    return peers


@lru_cache(maxsize=1024)
def _ranks(parts: tuple[Part, ...] | tuple[Strip, ...]) -> tuple[int, ...]:
    return tuple(dict.fromkeys(part.peer for part in parts))


class _Places:
    """Counts where messages of a pass lie in a region: one after the other."""

    def __init__(self, size: int) -> None:
        self._count, self._offset = [0] * size, [0] * size

    def clear(self) -> None:
        for peer in range(len(self._count)):
            self._count[peer] = self._offset[peer] = 0

    def next(self, peer: int, size: int) -> tuple[int, int]:
        """Return (index, offset) of the next message."""
        found = self._count[peer], self._offset[peer]
        self._count[peer] += 1
        self._offset[peer] += -(-size // ALIGNMENT) * ALIGNMENT
        return found


class _Wait:
    """Describes what is waited for. The text is made only if it does not arrive."""

    __slots__ = ("label", "missing", "rank", "size")

    def __init__(self, rank: int, size: int, label: str, missing: str) -> None:
        self.rank, self.size, self.label, self.missing = rank, size, label, missing

    def __call__(self, flag: int) -> str:
        return f"rank {self.rank}, {self.label}: rank {peer_of(flag, self.size)} {self.missing}"


class _Arrivals:
    """The handle of what all ranks send at once to this rank's inbox."""

    __slots__ = ("_flags", "_mark", "_what", "memory")

    def __init__(self, memory: PeerMemory, flags: Sequence[int], mark: int, what: _Wait) -> None:
        self.memory, self._flags, self._mark, self._what = memory, flags, mark, what

    def wait(self) -> None:
        self.memory.check()
        self.memory.wait(self._flags, self._mark, self._what, copying=False)


class _Arrival(_Arrivals):
    """The handle of one message, and the buffer that receives it, which may be outside of the inbox."""

    __slots__ = ("_buffer", "_inbox")

    def __init__(self, memory: PeerMemory, flag: int, mark: int, what: _Wait, inbox: Tensor, buffer: Tensor) -> None:
        super().__init__(memory, [flag], mark, what)
        self._inbox, self._buffer = inbox, buffer

    def wait(self) -> None:
        super().wait()
        if self._buffer.data_ptr() != self._inbox.data_ptr():
            self._buffer.copy_(self._inbox)
