"""What a transport is: it moves byte buffers between the ranks of one group, and returns handles.

Both ends post matching moves in the same order. Nothing is looked up by name, no state is shared between two groups,
and nothing depends on what another rank has cached.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from burst_portable.errors import CommunicationError


class Handle(Protocol):
    """A transfer that is under way."""

    def wait(self) -> None:
        """Return when the buffer may be used (on a device: when work issued from now on may use it).

        Raises a `CommunicationError` that names the peer when the transfer failed or came too late.
        """


class Message(NamedTuple):
    """One contiguous uint8 buffer, the rank that it goes to or comes from, and its place: see `Transport.inbox`."""

    buffer: Tensor
    peer: int
    place: int | None = None


class Part(NamedTuple):
    """Bytes [start, stop) of a buffer, the rank that they go to or come from, and their place: see `Transport.inbox`.

    A rank may be its own peer; the bytes are then copied to that place.
    """

    peer: int
    start: int
    stop: int
    place: int | None = None

    @property
    def size(self) -> int:
        """In bytes."""
        return self.stop - self.start


class Strip(NamedTuple):
    """Lines of bytes that lie apart, the rank that they go to, and their place there: see `Transport.inbox`.

    ::

        here, from byte `start` on      ####......####......####        `lines` of `width` bytes, `step` from one to the
        there, from `place` on          ####..####..####                next; there it is `jump`

    Neither `step` nor `jump` is less than the width, even for a single line: copy engines refuse that.
    """

    peer: int
    start: int
    place: int
    lines: int
    width: int
    step: int
    jump: int

    @property
    def size(self) -> int:
        """In bytes."""
        return self.lines * self.width


class Parts(NamedTuple):
    """One contiguous buffer of any dtype, and which of its bytes go to or come from which ranks."""

    buffer: Tensor
    parts: tuple[Part, ...]

    def messages(self) -> list[Message]:
        """One message for each part."""
        flat = self.buffer.reshape(-1).view(torch.uint8)
        return [Message(flat[p.start : p.stop], p.peer, p.place) for p in self.parts]


class Strips(NamedTuple):
    """A tensor of any strides, and which of its memory goes to which ranks."""

    buffer: Tensor
    parts: tuple[Strip, ...]


class Exchange:
    """Messages between all ranks, under way, as one rank sees them.

    Args:
        leaving, arriving: handles of what this rank sends and receives.
        own: (source, target) buffers of what it sends to itself, unless its transport moves that.
    """

    def __init__(
        self, leaving: Sequence[Handle], arriving: Sequence[Handle], own: Sequence[tuple[Tensor, Tensor]] = ()
    ) -> None:
        self._leaving, self._arriving, self._own = leaving, arriving, own

    def copy_own(self) -> None:
        """Copy what this rank sends to itself; call it once, before `wait`, best while the rest is on its way."""
        for source, target in self._own:
            target.copy_(source)

    def wait(self) -> None:
        """Return when everything that comes to this rank may be used."""
        for handle in dict.fromkeys(self._arriving):
            handle.wait()

    def left(self) -> None:
        """Return when what this rank sends may be changed."""
        for handle in dict.fromkeys(self._leaving):
            handle.wait()


class Transport(ABC):
    """The ranks of one group, as seen from one of them.

    Attributes:
        name: its name in reports.
        rank, size: this rank's number in the group, and the size of the group.
        host: whether buffers in host memory can be sent, and have arrived once a handle has been waited for.
        passes: how many passes this rank has begun on it; see `comm.agreement`.
        agreed: digests of the calls that its ranks need not compare again; see `comm.agreement`.
        direct: whether it serves only passes whose messages go straight to where they are used.
        persistent_inbox: whether the contents of an inbox stay there after the pass.
        supports_strided_sends: whether `exchange` also sends `Strips`, so that senders need not pack.
        ranks_per_node: ranks per node, if messages between nodes have connections of their own; else 0.
        pass_active: whether a pass has begun here and not ended.
        exchange_active: the same of messages between passes.
        high_priority: whether its messages are moved by kernels that get room on a device before kernels that compute.
    """

    name: str
    rank: int
    size: int
    host: bool = True
    passes: int = 0
    direct: bool = False
    persistent_inbox: bool = False
    supports_strided_sends: bool = False
    ranks_per_node: int = 0
    pass_active: bool = False
    exchange_active: bool = False
    high_priority: bool = False

    @property
    def others(self) -> list[int]:
        """The other ranks, beginning with the next."""
        return [(self.rank + distance) % self.size for distance in range(1, self.size)]

    @property
    def agreed(self) -> set[bytes]:
        """See above; made on first use."""
        found: set[bytes] = self.__dict__.setdefault("_agreed", set())
        return found

    def check_in_sync(self) -> None:
        """Raise a `CommunicationError` if what was done last never ended: its messages would be taken for others.

        Ranks ask it before they tell each other anything: other sizes end a process over gloo, or are taken in silence.
        """
        if last := self.unfinished():
            raise CommunicationError(
                f"rank {self.rank}: the last {last} has not ended; its messages would be taken for those of this call",
                next_step="after an error in a pass or an exchange, end the process group; one mesh serves one "
                "thread at a time",
            )

    def unfinished(self) -> str:
        """What was begun here and has not ended, in words; empty if nothing."""
        return "pass" if self.pass_active else "exchange between passes" if self.exchange_active else ""

    def between_passes(self) -> AbstractContextManager[None]:
        """A context around messages between passes. What an error leaves of them stays: see `check_in_sync`."""
        return self._exchange()

    @contextmanager
    def _exchange(self) -> Iterator[None]:
        before, self.exchange_active = self.exchange_active, True
        yield
        self.exchange_active = before

    def mark_out_of_sync(self) -> None:
        """Refuse all further calls: the others wait for one that this rank left out, and were not told."""
        self.exchange_active = True

    def begin(self, digest: bytes = b"", inbox: int = 0) -> None:
        """A pass begins on the current stream; every rank calls this. Raises as `check_in_sync`.

        Args:
            digest: of what all ranks state alike about it.
            inbox: the most bytes that come from one rank in this pass; the average if all messages have places.
        """
        self.check_in_sync()
        self.pass_active = True

    def end(self) -> None:
        """The pass is over: everything that arrived has been used, in the order of the current stream."""
        self.pass_active = False

    @abstractmethod
    def post(
        self, sends: Sequence[Message], receives: Sequence[Message], label: str = ""
    ) -> tuple[list[Handle], list[Handle]]:
        """Start all of them at once; returns handles of the sends and of the receives, in order.

        Until its handle has been waited for, a buffer that is sent must not change, and one that is received into
        must not be used. `label` names the step in errors.
        """

    def buffer(self, size: int, device: torch.device) -> Tensor:
        """A new buffer of `size` bytes that this transport can send from and receive into."""
        return torch.empty(size, dtype=torch.uint8, device=device)

    def inbox(self, size: int, device: torch.device, peer: int, place: int | None = None) -> Tensor:
        """A buffer to receive into: where the message will lie, if senders write there, else a new one.

        With a `place` (a byte offset, which senders name as well) it begins there, and holds messages that lie one
        after the other, whoever sends them. Without a place it is for the next message of that peer, so buffers must
        be requested in the order in which messages are posted. Either all messages of a pass have places, or none. The
        buffer may be used until the pass ends.
        """
        return self.buffer(size, device)

    def exchange(
        self, leaving: Sequence[Parts | Strips], arriving: Sequence[Parts], label: str, *, alone: bool = False
    ) -> Exchange:
        """Start messages between all ranks, one or more for each pair; every rank calls this, with the same label.

        Or between the ranks of each node separately: only the ranks that the parts name take part, and nothing may
        wait for others.

        Each of `leaving` has parts for the same ranks, and each of `arriving` has parts from the same ranks. This rank
        may be among them: `Exchange.copy_own` copies the first part that it sends to itself to the first part that it
        receives from itself, and so on.

        Args:
            leaving: what this rank sends; `Strips` only if this transport `supports_strided_sends`.
            arriving: where it receives.
            label: names the exchange in errors.
            alone: whether no kernel runs until everything has arrived, so that kernels may move it.
        """
        packed = [one for one in leaving if isinstance(one, Parts)]
        assert len(packed) == len(leaving), "this transport does not pick"
        sends, receives = ([m for parts in side for m in parts.messages()] for side in (packed, arriving))
        out, back = ([m for m in side if m.peer != self.rank] for side in (sends, receives))
        own = ([m.buffer for m in side if m.peer == self.rank] for side in (sends, receives))
        return Exchange(*self.post(out, back, label), list(zip(*own, strict=True)))

    def all_to_all(self, sends: Sequence[Tensor], receives: Sequence[Tensor], label: str = "all_to_all") -> None:
        """sends[r] goes to rank r, receives[r] comes from it; uint8, any sizes; returns when all have arrived."""
        if receives[self.rank].data_ptr() != sends[self.rank].data_ptr():
            receives[self.rank].copy_(sends[self.rank])
        out = [Message(sends[r], r) for r in self.others if sends[r].numel()]
        back = [Message(receives[r], r) for r in reversed(self.others) if receives[r].numel()]
        exchange = Exchange(*self.post(out, back, label))
        exchange.wait()
        exchange.left()

    def all_gather(self, send: Tensor, receives: Sequence[Tensor], label: str = "all_gather") -> None:
        """receives[r] is what rank r sent; uint8, any sizes; returns when all have arrived."""
        self.all_to_all([send] * self.size, receives, label)

    def share(self, data: bytes, label: str = "share", deadline: float | None = None) -> list[bytes]:
        """A few bytes of every rank, in rank order; equally many from each. It may be called inside a pass and outside.

        Raises a `CommunicationError` when a rank does not take part within the deadline (seconds). This implementation
        uses messages and has their deadline; transports that can keep another override it.
        """
        mine = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        parts = [torch.empty_like(mine) for _ in range(self.size)]
        with self.between_passes():
            self.all_gather(mine, parts, label)
        return [bytes(part.numpy()) for part in parts]

    def close(self) -> None:  # noqa: B027  (most transports hold nothing)
        """Release what this transport holds."""


class WrappedTransport(Transport):
    """See `comm.base.Transport`. The inner transport counts passes, and remembers what ranks have agreed on.

    An exchange becomes messages that are posted here.
    """

    def __init__(self, inner: Transport) -> None:
        self._inner = inner
        self.name, self.rank, self.size, self.host = inner.name, inner.rank, inner.size, inner.host
        self.persistent_inbox, self.high_priority = inner.persistent_inbox, inner.high_priority

    @property
    def passes(self) -> int:
        return self._inner.passes

    @passes.setter
    def passes(self, count: int) -> None:
        self._inner.passes = count

    @property
    def agreed(self) -> set[bytes]:
        return self._inner.agreed

    def check_in_sync(self) -> None:
        self._inner.check_in_sync()

    def between_passes(self) -> AbstractContextManager[None]:
        return self._inner.between_passes()

    def mark_out_of_sync(self) -> None:
        self._inner.mark_out_of_sync()

    def begin(self, digest: bytes = b"", inbox: int = 0) -> None:
        self._inner.begin(digest, inbox)

    def end(self) -> None:
        self._inner.end()

    def post(
        self, sends: Sequence[Message], receives: Sequence[Message], label: str = ""
    ) -> tuple[list[Handle], list[Handle]]:
        return self._inner.post(sends, receives, label)

    def buffer(self, size: int, device: torch.device) -> Tensor:
        return self._inner.buffer(size, device)

    def inbox(self, size: int, device: torch.device, peer: int, place: int | None = None) -> Tensor:
        return self._inner.inbox(size, device, peer, place)

    def share(self, data: bytes, label: str = "share", deadline: float | None = None) -> list[bytes]:
        return self._inner.share(data, label, deadline)

    def close(self) -> None:
        self._inner.close()
