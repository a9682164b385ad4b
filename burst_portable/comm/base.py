"""What a transport is: it moves byte buffers between the ranks of one group, and returns handles.

Both ends post matching moves in the same order; nothing is looked up by name, no transport has state of its own
that two groups share, and none depends on what another rank has cached.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from burst_portable.errors import CommunicationError, explain


class Handle(Protocol):
    """A transfer under way."""

    def wait(self) -> None:
        """Return when the buffer may be used (on a device: when work issued from now on may use it).

        Raises a `CommunicationError` that names the peer when the transfer failed or came too late.
        """


class Message(NamedTuple):
    """One contiguous uint8 buffer, the rank that it goes to or comes from, and its place there: see `inbox`."""

    buffer: Tensor
    peer: int
    place: int | None = None


class Part(NamedTuple):
    """Bytes [start, stop) of a buffer, the rank that they go to or come from, and their place there: see `inbox`.

    A rank may be its own peer: then they are copied to that place.
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
    """Lines of bytes that lie apart, the rank that they go to, and their place there: see `inbox`.

    ::

        here, from byte `start` on      ####......####......####        `lines` of `width` bytes, `step` from one to the
        there, from `place` on          ####..####..####                next; there it is `jump`

    Neither is less than the width, even of a single line: copy engines refuse that.
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
    """One contiguous buffer of any dtype, and what of its bytes goes to or comes from ranks."""

    buffer: Tensor
    parts: tuple[Part, ...]

    def messages(self) -> list[Message]:
        """A message each."""
        flat = self.buffer.reshape(-1).view(torch.uint8)
        return [Message(flat[p.start : p.stop], p.peer, p.place) for p in self.parts]


class Strips(NamedTuple):
    """A tensor of any strides, and what of its memory goes to ranks."""

    buffer: Tensor
    parts: tuple[Strip, ...]


class Exchange:
    """Messages between all ranks that are under way, as one rank sees them.

    Args:
        leaving, arriving: handles of what this rank sends and receives.
        own: (source, target) buffers of what it sends itself, where its transport does not move that.
    """

    def __init__(
        self, leaving: Sequence[Handle], arriving: Sequence[Handle], own: Sequence[tuple[Tensor, Tensor]] = ()
    ) -> None:
        self._leaving, self._arriving, self._own = leaving, arriving, own

    def copy_own(self) -> None:
        """Copy what this rank sends itself, once and before `wait`; best while the rest is on its way."""
        for source, target in self._own:
            target.copy_(source)

    def wait(self) -> None:
        """Return when all that comes to this rank may be used."""
        for handle in dict.fromkeys(self._arriving):
            handle.wait()

    def left(self) -> None:
        """Return when what this rank sends may be changed."""
        for handle in dict.fromkeys(self._leaving):
            handle.wait()


class Transport(ABC):
    """The ranks of one group, as seen from one of them.

    Attributes:
        name: what it is called in reports.
        rank, size: this rank among those of the group.
        host: whether buffers in host memory can be sent, and are there when a handle has been waited for.
        passes: how many passes this rank has begun on it; see `comm.agreement`.
        agreed: digests of the calls that its ranks need not compare again; see `comm.agreement`.
        direct: whether it serves only passes whose messages go straight to where they are used.
        lasting: whether what an inbox holds stays there when the pass is over.
        picks: whether `exchange` sends `Strips` too: nobody need pack what it sends.
        node: ranks a node, if messages between nodes have connections of their own; else 0.
        under_way: whether a pass has begun here that has not ended.
        goes_first: whether kernels move its messages that get room on a device before kernels that compute.
    """

    name: str
    rank: int
    size: int
    host: bool = True
    passes: int = 0
    direct: bool = False
    lasting: bool = False
    picks: bool = False
    node: int = 0
    under_way: bool = False
    goes_first: bool = False

    @property
    def others(self) -> list[int]:
        """The other ranks, the next one first."""
        return [(self.rank + distance) % self.size for distance in range(1, self.size)]

    @property
    def agreed(self) -> set[bytes]:
        """See above; made when it is first asked for."""
        found: set[bytes] = self.__dict__.setdefault("_agreed", set())
        return found

    def check_in_step(self) -> None:
        """Raise a `CommunicationError` where the pass before never ended: the next would be given its messages."""
        if self.under_way:
            raise CommunicationError(
                explain(
                    f"rank {self.rank}: the pass before has not ended, and its messages would be taken for this one's",
                    next_step="after an error in a pass, end the process group; one mesh serves one thread at a time",
                )
            )

    def begin(self, digest: bytes = b"", inbox: int = 0) -> None:
        """A pass begins, on the current stream; every rank says so. Raises as `check_in_step`.

        Args:
            digest: what all ranks say of it alike.
            inbox: bytes that come from a rank in this pass, at most; or on average, where all messages have places.
        """
        self.check_in_step()
        self.under_way = True

    def end(self) -> None:
        """The pass is over: all that came has been used, in the order of the current stream."""
        self.under_way = False

    @abstractmethod
    def post(
        self, sends: Sequence[Message], receives: Sequence[Message], label: str = ""
    ) -> tuple[list[Handle], list[Handle]]:
        """Start all of them at once; handles of the sends and of the receives, in order.

        Until its handle has been waited for, a buffer that is sent must not change, and one that is received into
        must not be used. `label` names the step in errors.
        """

    def buffer(self, size: int, device: torch.device) -> Tensor:
        """A fresh message buffer of so many bytes, which this transport can send from and receive into."""
        return torch.empty(size, dtype=torch.uint8, device=device)

    def inbox(self, size: int, device: torch.device, peer: int, place: int | None = None) -> Tensor:
        """A buffer to receive into: where the message will lie, if senders write there, else a fresh one.

        With a `place` (a byte offset, which senders name as well) it begins there, and holds messages that lie one
        after the other, whoever sends them. Without one it is for the next message of that peer, so buffers are asked
        for in the order in which messages are posted. All messages of a pass have places, or none has. The buffer may
        be used until the pass ends.
        """
        return self.buffer(size, device)

    def exchange(
        self, leaving: Sequence[Parts | Strips], arriving: Sequence[Parts], label: str, *, alone: bool = False
    ) -> Exchange:
        """Start messages between all ranks, one or more for each pair; every rank does, with the same label.

        Or between the ranks of every node, at once: those that the parts name are the whole of it for this rank, and
        nothing may wait for others.

        Each of `leaving` has parts for the same ranks, and each of `arriving` has parts from the same ranks. This rank
        may be among them: `Exchange.copy_own` copies the first part that it sends itself to the first that it
        receives from itself, and so on.

        Args:
            leaving: what this rank sends; `Strips` only where this transport `picks` them.
            arriving: where it receives.
            label: names the exchange in errors.
            alone: no kernel runs until all has come, so a transport may move it by kernels.
        """
        packed = [one for one in leaving if isinstance(one, Parts)]
        assert len(packed) == len(leaving), "this transport picks nothing"
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
        """A few bytes of every rank, in rank order; equally many on all. It may be asked inside a pass and outside.

        Raises a `CommunicationError` when a rank does not take part within the deadline (seconds). This one is made of
        messages and has their deadline; transports that can keep another have a `share` of their own.
        """
        mine = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        parts = [torch.empty_like(mine) for _ in range(self.size)]
        self.all_gather(mine, parts, label)
        return [bytes(part.numpy()) for part in parts]

    def close(self) -> None:  # noqa: B027  (most transports hold nothing)
        """Let go of what this transport holds."""
