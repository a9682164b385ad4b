"""Send messages by peer copies: the sender writes into the memory of the receiver.

::

    sender                                   receiver
                                             a pass begins: set "my inbox is free"     -> every peer
    copy stream: wait for that flag
    copy the message to its offset
    set "the message has arrived"        ->  compute stream: wait for that flag; use the message in place

Copy engines move the blocks while a kernel runs, without using a multiprocessor. An exchange between all ranks has one
flag per pair of ranks, because all its messages are waited for together. Both ranks take the offset of a message in the
inbox from the plan. Messages outside of plans are consecutive in a region for each peer.

A flag has the mark of its pass: a growing number and a part of the call's digest. So a flag of an earlier pass or of
another call is never taken for one of this pass. When the numbers start again from 1, the parts of the digest differ.
Each rank sends to the next rank first, so that no link serves two ranks at once.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any, Protocol
from zlib import crc32

import torch
from torch import Tensor

from burst_portable.comm.base import Exchange, Handle, Handles, Message, Part, Parts, Strip, Strips, Transport
from burst_portable.errors import UnsupportedError

MESSAGES = 64
"""Limit of messages from one rank to another in one pass."""
EXCHANGES = 32
"""Limit of exchanges in one pass."""


def flags(size: int) -> int:
    """Return the number of flags of each of `size` ranks."""
    return size * (MESSAGES + 1 + EXCHANGES)


def arrival_flag(peer: int, index: int) -> int:
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


Watched = Callable[[int], str]
"""Returns the error text of a flag that was not set in time."""


class PeerMemory(Protocol):
    """Memory and flags that every rank of a group can write, and a copy stream.

    Only `reserve` blocks the host. `copying` selects the copy stream instead of the current stream.
    """

    rank: int
    size: int

    def reserve(self, inbox_bytes: int) -> None:
        """Allocate an inbox of this many bytes and flags of 0 on every rank. All ranks must pass the same size.

        Releases earlier memory, even if this raises.
        """

    def inbox(self, offset: int, size: int) -> Tensor:
        """Return [offset, offset + size) of this rank's inbox."""

    def enter(self) -> None:
        """Begin a pass on the current stream, after the last pass on any stream. Begins none if it raises."""

    def leave(self) -> None:
        """End the pass: the next one runs after all work that was issued to the current stream."""

    def fork(self) -> None:
        """Make the copy stream wait for all work that was issued to the current stream."""

    def copy(self, sends: Sequence[Parts | Strips], *, exclusive: bool) -> None:
        """Copy parts of buffers to their offsets in inboxes, on the copy stream.

        If `exclusive`, no other kernel runs, so that a kernel may copy. Otherwise all parts go to other ranks.
        """

    def copy_local(self, sends: Sequence[Parts | Strips]) -> None:
        """Copy parts that this rank sends to itself, on the current stream."""

    def sent(self) -> Handle:
        """Return a handle for all work that was issued to the copy stream."""

    def signal(self, flags: Sequence[tuple[int, int]], mark: int, *, copying: bool) -> None:
        """Set flags, as (peer, flag), after all work that was issued to the stream."""

    def wait(self, flags: Sequence[int], mark: int, what: Watched, *, copying: bool) -> None:
        """Make the stream wait until all these flags of this rank have the mark."""

    def check(self) -> None:
        """Raise the error of a wait that was too late, if there is one."""

    def close(self) -> None:
        """Release the memory. Collective."""


class PeerCopyTransport(Transport):
    """See `comm.base.Transport`. Messages in a pass are peer copies; all others use `fallback`.

    It shares the state of `fallback`, which other meshes of the group check, and over which a rank sends its error.
    """

    host = False
    direct = True
    supports_strided_sends = True

    def __init__(self, memory: PeerMemory, fallback: Transport) -> None:
        super().__init__("peer_copy", memory.rank, memory.size, fallback.state)
        self.memory, self._fallback = memory, fallback
        self._region = self._number = self._mark = self._turn = self._exchanges = 0
        self._free_peers: set[int] = set()  # peers whose free inbox was waited for
        # By peer: (index, offset) of the next message, and buffers that are not posted yet
        self._next_send: dict[int, tuple[int, int]] = {}
        self._next_receive: dict[int, tuple[int, int]] = {}
        self._receive_buffers: dict[int, list[tuple[int, Tensor]]] = defaultdict(list)

    def unfinished(self) -> str:
        return self._fallback.unfinished()

    def begin(self, digest: bytes = b"", bytes_per_sender: int = 0) -> None:
        memory = self.memory
        memory.check()
        self.check_in_sync()
        need = -(-(bytes_per_sender + MESSAGES * ALIGNMENT) // ALIGNMENT) * ALIGNMENT
        if need > self._region:
            self._region = 0  # `reserve` releases earlier memory even if it raises
            memory.reserve(need * self.size)
            self._region, self._number = need, 0
        memory.enter()  # before the pass is active: it may raise
        super().begin(digest, bytes_per_sender)
        self._number = self._number % (MARKS - 1) + 1
        self._turn += self._number == 1
        self._mark = self._number << 16 | crc32(digest, self._turn) & 0xFFFF
        self._exchanges = 0
        for state in (self._next_send, self._next_receive, self._free_peers, self._receive_buffers):
            state.clear()
        free = free_flag(self.size, self.rank)
        memory.signal([(peer, free) for peer in self.other_ranks], self._mark, copying=False)

    def end(self) -> None:
        self.memory.leave()
        super().end()

    def receive_buffer(self, size: int, device: torch.device, peer: int, offset: int | None = None) -> Tensor:
        if not self.state.pass_active or not size:
            return self._fallback.receive_buffer(size, device, peer)
        if offset is not None:
            assert offset + size <= self._region * self.size, "the inbox has space for all messages"
            return self.memory.inbox(offset, size)
        index, start = self._take(self._next_receive, peer, size)
        buffer = self.memory.inbox(peer * self._region + start, size)
        self._receive_buffers[peer].append((index, buffer))
        return buffer

    def buffer(self, size: int, device: torch.device) -> Tensor:
        return self._fallback.buffer(size, device)

    def post(self, sends: Sequence[Message], receives: Sequence[Message], label: str = "") -> Handles:
        if not self.state.pass_active:
            return self._fallback.post(sends, receives, label)
        self.memory.check()
        incoming: list[Handle] = [self._expect(message, label) for message in receives]
        if not sends:
            return [], incoming
        self.memory.fork()
        for message in sorted(sends, key=lambda m: (m.peer - self.rank) % self.size):
            self._send(message, label)
        return [self.memory.sent()] * len(sends), incoming

    def exchange(
        self, sends: Sequence[Parts | Strips], receives: Sequence[Parts], label: str, *, exclusive: bool = False
    ) -> Exchange:
        """See `Transport.exchange`. Each peer sets one flag when all of its buffers have arrived."""
        if not self.state.pass_active or not sends or sends[0].parts[0].offset is None:
            return super().exchange(sends, receives, label)
        memory, index = self.memory, self._exchanges
        memory.check()
        if index >= EXCHANGES:
            raise self._no_space(f"exchange {index + 1}", f"{EXCHANGES} exchanges")
        self._exchanges += 1
        targets = _peers(sends)
        flag = exchange_flag(self.size, index, self.rank)
        memory.fork()
        self._wait_until_free(targets, label)
        local: list[Parts | Strips] = []
        if not exclusive:
            # Multiprocessors make copies within a device. On the copy stream such copies wait for a kernel that
            # occupies them all, and messages wait behind the copies.
            sends, local = _split(sends, self.rank)
        memory.copy(sends, exclusive=exclusive)
        memory.signal([(peer, flag) for peer in targets], self._mark, copying=True)
        arrivals = exchange_flags(self.size, index, _peers(receives))
        return _PeerExchange(memory, local, _Arrivals(memory, arrivals, self._mark, self._text(label, _NOT_SENT)))

    def share(self, data: bytes, label: str = "share", timeout: float | None = None) -> list[bytes]:
        return self._fallback.share(data, label, timeout)

    def close(self) -> None:
        self.memory.close()
        self._fallback.close()

    # ----------------------------------------------------------------------------------------- one message

    def _send(self, message: Message, label: str) -> None:
        memory, peer = self.memory, message.peer
        if message.offset is not None:
            index, offset = self._take(self._next_send, peer, 0)[0], message.offset
        else:
            index, start = self._take(self._next_send, peer, message.buffer.numel())
            offset = self.rank * self._region + start
        self._wait_until_free([peer], label)
        memory.copy([Parts(message.buffer, (Part(peer, 0, message.buffer.numel(), offset),))], exclusive=False)
        memory.signal([(peer, arrival_flag(self.rank, index))], self._mark, copying=True)

    def _wait_until_free(self, peers: Sequence[int], label: str) -> None:
        """Make the copy stream wait until the inboxes of these peers are free, once per pass for each peer."""
        new = [peer for peer in peers if peer not in self._free_peers and peer != self.rank]
        if not new:
            return
        self._free_peers.update(new)
        what = self._text(label, "has not freed its inbox")
        self.memory.wait([free_flag(self.size, peer) for peer in new], self._mark, what, copying=True)

    def _expect(self, message: Message, label: str) -> Handle:
        peer = message.peer
        if message.offset is not None:
            index, arriving = self._take(self._next_receive, peer, 0)[0], message.buffer
        else:
            if not self._receive_buffers[peer]:
                self.receive_buffer(message.buffer.numel(), message.buffer.device, peer)
            index, arriving = self._receive_buffers[peer].pop(0)
        assert arriving.numel() == message.buffer.numel(), "buffers from `receive_buffer` are posted in their order"
        copy = () if message.buffer.data_ptr() == arriving.data_ptr() else (message.buffer, arriving)
        flags = (arrival_flag(peer, index),)
        return _Arrivals(self.memory, flags, self._mark, self._text(label, _NOT_SENT), *copy)

    def _text(self, label: str, missing: str) -> Watched:
        """Return the error text of a wait, which is made only if a flag is not set in time."""
        return partial(_error_text, self.rank, self.size, label, missing)

    def _take(self, following: dict[int, tuple[int, int]], peer: int, size: int) -> tuple[int, int]:
        """Return (index, offset) of the next message from or to a peer. They are one after the other in a region."""
        index, offset = following.get(peer, (0, 0))
        following[peer] = index + 1, offset + -(-size // ALIGNMENT) * ALIGNMENT
        if index >= MESSAGES or offset + size > self._region:
            got = f"message {index + 1} of rank {peer}, {offset + size} bytes in all"
            raise self._no_space(got, f"{MESSAGES} messages, {self._region} bytes")
        return index, offset

    def _no_space(self, got: str, allowed: str) -> UnsupportedError:
        what = f"peer copies: rank {self.rank} has no space for another message in this pass"
        step = "pass the bytes of all messages to `begin`, or use another transport"
        return UnsupportedError(what, got=got, allowed=allowed, next_step=step)


class _PeerExchange(Exchange):
    """Messages between all ranks. Unless the exchange is exclusive, a rank copies its local part separately."""

    def __init__(self, memory: PeerMemory, local: Sequence[Parts | Strips], arrivals: _Arrivals) -> None:
        super().__init__([memory.sent()], [arrivals])
        self._memory, self._parts = memory, local

    def copy_local(self) -> None:
        if self._parts:
            self._memory.copy_local(self._parts)


def _split(sends: Sequence[Parts | Strips], rank: int) -> tuple[list[Parts | Strips], list[Parts | Strips]]:
    """Return (parts for other ranks, parts for this rank)."""
    sides: tuple[list[Parts | Strips], list[Parts | Strips]] = ([], [])
    for one in sends:
        for side, parts in zip(sides, _split_parts(one.parts, rank), strict=True):
            if parts:
                side.append(one._replace(parts=parts))
    return sides


@lru_cache(maxsize=1024)
def _split_parts(parts: tuple[Any, ...], rank: int) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    return tuple(part for part in parts if part.peer != rank), tuple(part for part in parts if part.peer == rank)


def _peers(side: Sequence[Parts | Strips]) -> tuple[int, ...]:
    """Return the ranks in the parts of one side of an exchange."""
    peers = _ranks(side[0].parts)
    assert all(_ranks(one.parts) == peers for one in side[1:]), "all buffers have parts for the same ranks"
    return peers


@lru_cache(maxsize=1024)
def _ranks(parts: tuple[Part, ...] | tuple[Strip, ...]) -> tuple[int, ...]:
    return tuple(dict.fromkeys(part.peer for part in parts))


_NOT_SENT = "has not sent its message"


def _error_text(rank: int, size: int, label: str, missing: str, flag: int) -> str:
    return f"rank {rank}, {label}: rank {peer_of(flag, size)} {missing}"


class _Arrivals:
    """Handle of messages in this rank's inbox. `copy`: target and source of a copy after their arrival, if any."""

    __slots__ = ("_copy", "_flags", "_mark", "_what", "memory")

    def __init__(self, memory: PeerMemory, flags: Sequence[int], mark: int, what: Watched, *copy: Tensor) -> None:
        self.memory, self._flags, self._mark, self._what, self._copy = memory, flags, mark, what, copy

    def wait(self) -> None:
        self.memory.check()
        self.memory.wait(self._flags, self._mark, self._what, copying=False)
        if self._copy:
            target, source = self._copy
            target.copy_(source)
