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


Handles = tuple[list[Handle], list[Handle]]
"""Handles of sends, and handles of receives."""


class Message(NamedTuple):
    """One contiguous uint8 buffer, its peer rank, and its offset in an inbox: see `Transport.receive_buffer`."""

    buffer: Tensor
    peer: int
    offset: int | None = None


class Part(NamedTuple):
    """Bytes [start, stop) of a buffer, their peer rank, and their offset in the inbox: see `Transport.receive_buffer`.

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
    """Lines of bytes at a constant distance, their target rank, and their offset there: see `Transport.receive_buffer`.

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
    """Messages between all ranks that were started: the part of one rank.

    Args:
        sends: Handles of this rank's sends.
        receives: Handles of its receives.
        local: (source, target) buffers of messages from this rank to itself. Default: the transport moves them.
    """

    def __init__(
        self, sends: Sequence[Handle], receives: Sequence[Handle], local: Sequence[tuple[Tensor, Tensor]] = ()
    ) -> None:
        self._sends, self._receives, self._local = sends, receives, local

    def copy_local(self) -> None:
        """Copy messages from this rank to itself. Call it once, before `wait`, preferably during the transfers."""
        for source, target in self._local:
            target.copy_(source)
        self._local = ()

    def wait(self) -> None:
        """Return when all received buffers may be used."""
        for handle in dict.fromkeys(self._receives):
            handle.wait()

    def wait_sent(self) -> None:
        """Return when all sent buffers may be changed. They are released, since exchanges last until a pass ends."""
        for handle in dict.fromkeys(self._sends):
            handle.wait()
        self._sends = ()


@dataclass(slots=True, eq=False)
class TransportState:
    """Progress of one rank on a transport. A transport that wraps another one shares its state.

    Attributes:
        passes: Number of passes that this rank has begun; see `comm.agreement`.
        pass_active: Whether a pass has begun and not ended.
        exchange_active: Whether messages between passes have begun and not ended.
    """

    passes: int = 0
    pass_active: bool = False
    exchange_active: bool = False


class Transport(ABC):
    """The messages of one rank to and from the other ranks of its group.

    A transport must define `post`, and sets those of the following class attributes that differ from their defaults.

    Attributes:
        name: Name in reports.
        rank: Number of this rank in the group.
        size: Number of ranks in the group.
        state: Progress of this rank.
        agreed: Digests of calls that the ranks need not compare again; see `comm.agreement`.
        host: Whether it can send buffers in host memory, which have arrived after `Handle.wait`.
        direct: Whether it serves only plans in which no rank forwards a message: see `Plan.direct`.
        keeps_received: Whether received data stay in their buffers after the pass.
        supports_strided_sends: Whether `exchange` also sends `Strips`, so that senders need not pack.
        ranks_per_node: Ranks per node if messages between nodes have separate connections; else 0.
        high_priority: Whether its kernels run on a stream of high priority, before kernels that compute.
    """

    host: bool = True
    direct: bool = False
    keeps_received: bool = False
    supports_strided_sends: bool = False
    ranks_per_node: int = 0
    high_priority: bool = False

    def __init__(self, name: str, rank: int, size: int, state: TransportState | None = None) -> None:
        self.name, self.rank, self.size = name, rank, size
        self.state = TransportState() if state is None else state
        self.agreed: set[bytes] = set()

    @property
    def other_ranks(self) -> list[int]:
        """The other ranks, beginning with the next one."""
        return [(self.rank + distance) % self.size for distance in range(1, self.size)]

    def check_in_sync(self) -> None:
        """Raise a `CommunicationError` if the last pass or exchange has not ended.

        Its messages would be matched with those of this call. Over gloo, a message of another size ends the process or
        is accepted silently. So ranks call this before they send anything.
        """
        if last := self.unfinished():
            what = f"rank {self.rank}: the last {last} has not ended; its messages would mix with those of this call"
            fix = "after an error in a pass or an exchange, end the process group; one mesh serves one thread at a time"
            raise CommunicationError(what, next_step=fix)

    def unfinished(self) -> str:
        """Return "pass" or "exchange between passes", whichever has begun and not ended; "" if none has."""
        if self.state.pass_active:
            return "pass"
        return "exchange between passes" if self.state.exchange_active else ""

    @contextmanager
    def between_passes(self) -> Iterator[None]:
        """Mark messages between passes as active. After an error they stay unfinished: see `check_in_sync`."""
        was_active, self.state.exchange_active = self.state.exchange_active, True
        yield
        self.state.exchange_active = was_active

    def mark_out_of_sync(self) -> None:
        """Make all further calls raise an error: other ranks wait for a call that this rank left out."""
        self.state.exchange_active = True

    def begin(self, digest: bytes = b"", bytes_per_sender: int = 0) -> None:
        """Begin a pass on the current stream, on every rank. Raises the errors of `check_in_sync`.

        Args:
            digest: Digest of the call signature, equal on all ranks.
            bytes_per_sender: Largest number of bytes that one rank sends to this rank in the pass; the mean over ranks
                if all messages have offsets.
        """
        self.check_in_sync()
        self.state.pass_active = True

    def end(self) -> None:
        """End the pass. All received buffers have been used, in the order of the current stream."""
        self.state.pass_active = False

    @abstractmethod
    def post(self, sends: Sequence[Message], receives: Sequence[Message], label: str = "") -> Handles:
        """Start all messages at once. Return handles of the sends and of the receives, in order.

        Before `Handle.wait` returns, a sent buffer must not change and a receive buffer must not be used.
        `label` names the step in errors.
        """

    def buffer(self, size: int, device: torch.device) -> Tensor:
        """Return a new buffer of `size` bytes that this transport can send from and receive into."""
        return torch.empty(size, dtype=torch.uint8, device=device)

    def receive_buffer(self, size: int, device: torch.device, peer: int, offset: int | None = None) -> Tensor:
        """Return a buffer to receive into, which may be used until the pass ends.

        If senders write into this rank's memory, its inbox, the buffer is part of that. With an `offset` in bytes,
        which senders use as well, it begins there and may receive consecutive messages from any sender. Without an
        offset it is for the next message of `peer`, so request buffers in the order in which messages are posted.
        Either all messages of a pass have offsets, or none.
        """
        return self.buffer(size, device)

    def exchange(
        self, sends: Sequence[Parts | Strips], receives: Sequence[Parts], label: str, *, exclusive: bool = False
    ) -> Exchange:
        """Start messages between all ranks, one or more for each pair. Every rank calls this with the same label.

        An exchange may also be among the ranks of each node. Then only the ranks in the parts take part, and a
        transport must not wait for other ranks.

        Args:
            sends: Buffers to send, each with parts for the same ranks; `Strips` only if `supports_strided_sends`.
            receives: Buffers to receive into, each with parts from the same ranks. If this rank is among them,
                `Exchange.copy_local` copies the parts that it sends to itself, in order.
            label: Name of the exchange in errors.
            exclusive: Whether no kernel computes until all messages have arrived, so that a kernel may copy them.
        """
        parts = [one for one in sends if isinstance(one, Parts)]
        assert len(parts) == len(sends), "this transport sends no strips"
        outgoing, incoming = ([m for one in side for m in one.messages()] for side in (parts, receives))
        remote_sends, remote_receives = ([m for m in side if m.peer != self.rank] for side in (outgoing, incoming))
        local = ([m.buffer for m in side if m.peer == self.rank] for side in (outgoing, incoming))
        return Exchange(*self.post(remote_sends, remote_receives, label), list(zip(*local, strict=True)))

    def all_to_all(self, sends: Sequence[Tensor], receives: Sequence[Tensor], label: str = "all_to_all") -> None:
        """Send sends[r] to rank r and receive receives[r] from it, until all have arrived. Buffers are uint8."""
        if receives[self.rank].data_ptr() != sends[self.rank].data_ptr():
            receives[self.rank].copy_(sends[self.rank])
        outgoing = [Message(sends[r], r) for r in self.other_ranks if sends[r].numel()]
        incoming = [Message(receives[r], r) for r in reversed(self.other_ranks) if receives[r].numel()]
        exchange = Exchange(*self.post(outgoing, incoming, label))
        exchange.wait()
        exchange.wait_sent()

    def all_gather(self, send: Tensor, receives: Sequence[Tensor], label: str = "all_gather") -> None:
        """Receive the buffer of rank r into receives[r], until all have arrived. Buffers are uint8."""
        self.all_to_all([send] * self.size, receives, label)

    def share(self, data: bytes, label: str = "share", timeout: float | None = None) -> list[bytes]:
        """Return a few bytes of every rank, in rank order. All ranks must pass the same number of bytes.

        Raises a `CommunicationError` if a rank does not take part within the timeout (seconds). This implementation
        sends messages and has their timeout. Transports with their own timeout override it.
        """
        local = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        parts = [torch.empty_like(local) for _ in range(self.size)]
        with self.between_passes():
            self.all_gather(local, parts, label)
        return [bytes(part.numpy()) for part in parts]

    def close(self) -> None:  # noqa: B027  (most transports have nothing to release)
        """Release the resources of this transport."""


class WrappedTransport(Transport):
    """Forward all calls to another transport, and share its state and `agreed`.

    An exchange becomes messages of this transport's `post`.
    """

    def __init__(self, wrapped: Transport) -> None:
        super().__init__(wrapped.name, wrapped.rank, wrapped.size, wrapped.state)
        self._wrapped, self.agreed = wrapped, wrapped.agreed
        self.host, self.high_priority = wrapped.host, wrapped.high_priority
        self.keeps_received = wrapped.keeps_received

    def unfinished(self) -> str:
        return self._wrapped.unfinished()

    def begin(self, digest: bytes = b"", bytes_per_sender: int = 0) -> None:
        self._wrapped.begin(digest, bytes_per_sender)

    def end(self) -> None:
        self._wrapped.end()

    def post(self, sends: Sequence[Message], receives: Sequence[Message], label: str = "") -> Handles:
        return self._wrapped.post(sends, receives, label)

    def buffer(self, size: int, device: torch.device) -> Tensor:
        return self._wrapped.buffer(size, device)

    def receive_buffer(self, size: int, device: torch.device, peer: int, offset: int | None = None) -> Tensor:
        return self._wrapped.receive_buffer(size, device, peer, offset)

    def share(self, data: bytes, label: str = "share", timeout: float | None = None) -> list[bytes]:
        return self._wrapped.share(data, label, timeout)

    def close(self) -> None:
        self._wrapped.close()
