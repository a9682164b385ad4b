"""Define `Transport`, which moves byte buffers between the ranks of one group and returns handles.

Both ends post matching messages in the same order. Nothing is looked up by name, no state is shared between two groups,
and nothing depends on what another rank has cached.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from burst_portable.errors import CommunicationError


class Handle(Protocol):
    """A transfer that has been started."""

    def wait(self) -> None:
        """Return when the buffer may be used (on a device: when work issued from now on may use it).

        Raises a `CommunicationError` that names the peer if the transfer failed or came too late.
        """


class Message(NamedTuple):
    """One contiguous uint8 buffer, its peer rank, and its offset in the receiver's inbox: see `Transport.inbox`."""

    buffer: Tensor
    peer: int
    offset: int | None = None


class Part(NamedTuple):
    """Bytes [start, stop) of a buffer, their peer rank, and their offset in the inbox: see `Transport.inbox`.

    A rank may be its own peer. The bytes are then copied within the rank.
    """

    peer: int
    start: int
    stop: int
    offset: int | None = None

    @property
    def size(self) -> int:
        """Size in bytes."""
        return self.stop - self.start


class Strip(NamedTuple):
    """Lines of bytes at a constant distance, their target rank, and their offset there: see `Transport.inbox`.

    ::

        here, from byte `start` on      ####......####......####        `lines` of `width` bytes, `step` from one to the
        there, from `offset` on         ####..####..####                next; there it is `jump`

    Neither `step` nor `jump` may be less than the width, even for a single line: copy engines reject that.
    """

    peer: int
    start: int
    offset: int
    lines: int
    width: int
    step: int
    jump: int

    @property
    def size(self) -> int:
        """Size in bytes."""
        return self.lines * self.width


class Parts(NamedTuple):
    """One contiguous buffer of any dtype, and which of its bytes go to or come from which ranks."""

    buffer: Tensor
    parts: tuple[Part, ...]

    def messages(self) -> list[Message]:
        """Return one message for each part."""
        flat = self.buffer.reshape(-1).view(torch.uint8)
        return [Message(flat[p.start : p.stop], p.peer, p.offset) for p in self.parts]


class Strips(NamedTuple):
    """A tensor of any strides, and which of its memory goes to which ranks."""

    buffer: Tensor
    parts: tuple[Strip, ...]


class Exchange:
    """Messages between all ranks that have been started, as one rank sees them.

    Args:
        leaving, arriving: handles of what this rank sends and receives.
        own: (source, target) buffers of what it sends to itself, unless its transport moves that.
    """

    def __init__(
        self, leaving: Sequence[Handle], arriving: Sequence[Handle], own: Sequence[tuple[Tensor, Tensor]] = ()
    ) -> None:
        self._leaving, self._arriving, self._own = leaving, arriving, own

    def copy_own(self) -> None:
        """Copy what this rank sends to itself. Call it once, before `wait`, preferably during the transfers."""
        for source, target in self._own:
            target.copy_(source)

    def wait(self) -> None:
        """Return when everything that this rank receives may be used."""
        for handle in dict.fromkeys(self._arriving):
            handle.wait()

    def wait_sent(self) -> None:
        """Return when what this rank sends may be changed."""
        for handle in dict.fromkeys(self._leaving):
            handle.wait()


@dataclass(slots=True, eq=False)
class TransportState:
    """Progress of one rank on a transport. A transport that wraps another shares the state of that one.

    Attributes:
        passes: how many passes this rank has begun; see `comm.agreement`.
        pass_active: whether a pass has begun and not ended.
        exchange_active: whether messages between passes have begun and not ended.
    """

    passes: int = 0
    pass_active: bool = False
    exchange_active: bool = False


class Transport(ABC):
    """The ranks of one group, as seen from one of them.

    A transport must define `post`, and sets those of the following that differ from their defaults.

    Attributes:
        name: its name in reports.
        rank, size: this rank's number in the group, and the size of the group.
        state: the progress of this rank.
        agreed: digests of the calls that the ranks need not compare again; see `comm.agreement`.
        host: whether buffers in host memory can be sent, and have arrived once a handle has been waited for.
        direct: whether it serves only passes whose messages go straight to where they are used.
        persistent_inbox: whether the contents of an inbox stay there after the pass.
        supports_strided_sends: whether `exchange` also sends `Strips`, so that senders need not pack.
        ranks_per_node: ranks per node, if messages between nodes have connections of their own; else 0.
        high_priority: whether its messages are moved by kernels that get room on a device before kernels that compute.
    """

    host: bool = True
    direct: bool = False
    persistent_inbox: bool = False
    supports_strided_sends: bool = False
    ranks_per_node: int = 0
    high_priority: bool = False

    def __init__(self, name: str, rank: int, size: int, state: TransportState | None = None) -> None:
        self.name, self.rank, self.size = name, rank, size
        self.state = TransportState() if state is None else state
        self.agreed: set[bytes] = set()

    @property
    def others(self) -> list[int]:
        """The other ranks, beginning with the next."""
        return [(self.rank + distance) % self.size for distance in range(1, self.size)]

    def check_in_sync(self) -> None:
        """Raise a `CommunicationError` if what was done last never ended: its messages would be taken for others.

        Ranks call this before they send anything: over gloo, other sizes end a process or are accepted silently.
        """
        if last := self.unfinished():
            raise CommunicationError(
                f"rank {self.rank}: the last {last} has not ended; its messages would be taken for those of this call",
                next_step="after an error in a pass or an exchange, end the process group; one mesh serves one "
                "thread at a time",
            )

    def unfinished(self) -> str:
        """Return what has begun and not ended, in words; "" if nothing."""
        if self.state.pass_active:
            return "pass"
        return "exchange between passes" if self.state.exchange_active else ""

    @contextmanager
    def between_passes(self) -> Iterator[None]:
        """Surround messages between passes. After an error they count as unfinished: see `check_in_sync`."""
        before, self.state.exchange_active = self.state.exchange_active, True
        yield
        self.state.exchange_active = before

    def mark_out_of_sync(self) -> None:
        """Make all further calls raise: other ranks wait for a call that this rank left out without a message."""
        self.state.exchange_active = True

    def begin(self, digest: bytes = b"", inbox: int = 0) -> None:
        """Begin a pass on the current stream. Every rank calls this. Raises as `check_in_sync`.

        Args:
            digest: digest of the call signature, which all ranks have in common.
            inbox: the most bytes that one rank sends here in this pass; the average if all messages have offsets.
        """
        self.check_in_sync()
        self.state.pass_active = True

    def end(self) -> None:
        """End the pass: everything that arrived has been used, in the order of the current stream."""
        self.state.pass_active = False

    @abstractmethod
    def post(
        self, sends: Sequence[Message], receives: Sequence[Message], label: str = ""
    ) -> tuple[list[Handle], list[Handle]]:
        """Start all messages at once. Return handles of the sends and of the receives, in order.

        Until its handle has been waited for, a buffer that is sent must not change, and a buffer that receives must not
        be used. `label` names the step in errors.
        """

    def buffer(self, size: int, device: torch.device) -> Tensor:
        """Return a new buffer of `size` bytes that this transport can send from and receive into."""
        return torch.empty(size, dtype=torch.uint8, device=device)

    def inbox(self, size: int, device: torch.device, peer: int, offset: int | None = None) -> Tensor:
        """Return a buffer to receive into: the memory that senders write to, if they do, else a new buffer.

        With an `offset` in bytes, which senders name as well, the buffer begins there. It then holds consecutive
        messages, from any sender. Without an offset it is for the next message of that peer, so buffers must be
        requested in the order in which messages are posted. Either all messages of a pass have offsets, or none. The
        buffer may be used until the pass ends.
        """
        return self.buffer(size, device)

    def exchange(
        self, leaving: Sequence[Parts | Strips], arriving: Sequence[Parts], label: str, *, alone: bool = False
    ) -> Exchange:
        """Start messages between all ranks, one or more for each pair. Every rank calls this with the same label.

        An exchange may also be among the ranks of each node: only ranks in the parts take part, and it must not wait
        for other ranks.

        Each of `leaving` has parts for the same ranks, and each of `arriving` has parts from the same ranks. This rank
        may be among them: `Exchange.copy_own` copies the first part that it sends to itself to the first part that it
        receives from itself, and so on.

        Args:
            leaving: what this rank sends; `Strips` only if this transport `supports_strided_sends`.
            arriving: where it receives.
            label: names the exchange in errors.
            alone: whether no kernel runs until everything has arrived, so that a kernel may copy it.
        """
        packed = [one for one in leaving if isinstance(one, Parts)]
        assert len(packed) == len(leaving), "this transport sends no strips"
        sends, receives = ([m for parts in side for m in parts.messages()] for side in (packed, arriving))
        out, back = ([m for m in side if m.peer != self.rank] for side in (sends, receives))
        own = ([m.buffer for m in side if m.peer == self.rank] for side in (sends, receives))
        return Exchange(*self.post(out, back, label), list(zip(*own, strict=True)))

    def all_to_all(self, sends: Sequence[Tensor], receives: Sequence[Tensor], label: str = "all_to_all") -> None:
        """Send sends[r] to rank r and receive receives[r] from it. Buffers are uint8. Return when all have arrived."""
        if receives[self.rank].data_ptr() != sends[self.rank].data_ptr():
            receives[self.rank].copy_(sends[self.rank])
        out = [Message(sends[r], r) for r in self.others if sends[r].numel()]
        back = [Message(receives[r], r) for r in reversed(self.others) if receives[r].numel()]
        exchange = Exchange(*self.post(out, back, label))
        exchange.wait()
        exchange.wait_sent()

    def all_gather(self, send: Tensor, receives: Sequence[Tensor], label: str = "all_gather") -> None:
        """Receive what rank r sends into receives[r]. Buffers are uint8. Return when all have arrived."""
        self.all_to_all([send] * self.size, receives, label)

    def share(self, data: bytes, label: str = "share", timeout: float | None = None) -> list[bytes]:
        """Return a few bytes of every rank, in rank order. All ranks pass equally many, inside a pass or outside.

        Raises a `CommunicationError` if a rank does not take part within the timeout (seconds). This implementation
        uses messages and has their timeout. Transports that can keep another one override it.
        """
        mine = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        parts = [torch.empty_like(mine) for _ in range(self.size)]
        with self.between_passes():
            self.all_gather(mine, parts, label)
        return [bytes(part.numpy()) for part in parts]

    def close(self) -> None:  # noqa: B027  (most transports hold nothing)
        """Release what this transport holds."""


class WrappedTransport(Transport):
    """A transport that hands everything on to another one, and shares its state and what its ranks agreed on.

    An exchange becomes messages that are posted here.
    """

    def __init__(self, wrapped: Transport) -> None:
        super().__init__(wrapped.name, wrapped.rank, wrapped.size, wrapped.state)
        self._wrapped, self.agreed = wrapped, wrapped.agreed
        self.host, self.persistent_inbox, self.high_priority = (
            wrapped.host,
            wrapped.persistent_inbox,
            wrapped.high_priority,
        )

    def unfinished(self) -> str:
        return self._wrapped.unfinished()

    def begin(self, digest: bytes = b"", inbox: int = 0) -> None:
        self._wrapped.begin(digest, inbox)

    def end(self) -> None:
        self._wrapped.end()

    def post(
        self, sends: Sequence[Message], receives: Sequence[Message], label: str = ""
    ) -> tuple[list[Handle], list[Handle]]:
        return self._wrapped.post(sends, receives, label)

    def buffer(self, size: int, device: torch.device) -> Tensor:
        return self._wrapped.buffer(size, device)

    def inbox(self, size: int, device: torch.device, peer: int, offset: int | None = None) -> Tensor:
        return self._wrapped.inbox(size, device, peer, offset)

    def share(self, data: bytes, label: str = "share", timeout: float | None = None) -> list[bytes]:
        return self._wrapped.share(data, label, timeout)

    def close(self) -> None:
        self._wrapped.close()
