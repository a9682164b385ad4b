"""Define wrong transports: a real one with one bug each in its messages. See `planted_bugs`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from burst_portable.comm.base import Handle, Message, Transport


class TransportWrapper(Transport):
    """A transport that forwards to the real one."""

    def __init__(self, wrapped: Transport) -> None:
        super().__init__(wrapped.name, wrapped.rank, wrapped.size, wrapped.state)
        self.wrapped, self.host, self.agreed = wrapped, wrapped.host, wrapped.agreed

    def post(
        self, sends: Sequence[Message], receives: Sequence[Message], label: str = ""
    ) -> tuple[list[Handle], list[Handle]]:
        return self.wrapped.post(sends, receives, label)

    def share(self, data: bytes, label: str = "share", timeout: float | None = None) -> list[bytes]:
        return self.wrapped.share(data, label, timeout)

    def buffer(self, size: int, device: torch.device) -> Tensor:
        return self.wrapped.buffer(size, device)


class DropsLastHop(TransportWrapper):
    """Discard the messages of the last step of a lap."""

    posts = 0

    def post(self, sends, receives, label=""):
        self.posts += bool(receives)
        if self.size > 1 and receives and self.posts % (self.size - 1) == 0:
            receives = [Message(torch.empty_like(m.buffer), m.peer) for m in receives]
        return super().post(sends, receives, label)


class ReusesBuffers(TransportWrapper):
    """Return one buffer per size, even while it is in use."""

    def __init__(self, wrapped: Transport) -> None:
        super().__init__(wrapped)
        self._buffers: dict[int, Tensor] = {}

    def buffer(self, size, device):
        return self._buffers.setdefault(size, super().buffer(size, device))


class ExchangesPair(TransportWrapper):
    """Receive two messages of equal size and one post in each other's buffers, if both come from the same peer."""

    same_peer = True

    def post(self, sends, receives, label=""):
        if len(receives) == 2 and len({m.buffer.numel() for m in receives}) == 1:
            first, second = receives
            if (first.peer == second.peer) == self.same_peer:
                receives = [first._replace(buffer=second.buffer), second._replace(buffer=first.buffer)]
        return super().post(sends, receives, label)


class ExchangesPeers(ExchangesPair):
    """Receive messages of equal size from two peers in each other's buffers."""

    same_peer = False


class RepeatsChunks(TransportWrapper):
    """Receive the first 4 MiB of a larger message again in place of its other parts."""

    def post(self, sends, receives, label=""):
        leaving, arriving = super().post(sends, receives, label)
        return leaving, [_Repeating(h, m.buffer) for h, m in zip(arriving, receives, strict=True)]


class _Repeating:
    def __init__(self, handle: Handle, buffer: Tensor, chunk: int = 1 << 22) -> None:
        self._handle, self._parts = handle, buffer.split(chunk)

    def wait(self) -> None:
        self._handle.wait()
        for part in self._parts[1:]:
            part.copy_(self._parts[0][: len(part)])


class _Nothing:
    def wait(self) -> None:
        """Return without waiting."""


class SkipsReceiveWait(TransportWrapper):
    """Report receives as complete when they are only posted."""

    def post(self, sends, receives, label=""):
        leaving, arriving = super().post(sends, receives, label)
        return leaving, [_Nothing() for _ in arriving]


class SkipsSendWait(TransportWrapper):
    """Report sends as complete when they are only posted."""

    def post(self, sends, receives, label=""):
        leaving, arriving = super().post(sends, receives, label)
        self.leaving = leaving  # torch would wait for a transfer without a reference
        return [_Nothing() for _ in leaving], arriving


class UsesGlobalRanks(TransportWrapper):
    """Use ranks of the group as global ranks. In the default group, both are equal."""

    def post(self, sends, receives, label=""):
        group = self.wrapped.group
        arriving = [dist.irecv(m.buffer, src=m.peer, group=group) for m in receives]
        return [dist.isend(m.buffer, dst=m.peer, group=group) for m in sends], arriving


class SendsOthersShares(TransportWrapper):
    """Send each rank the part for the previous rank in an exchange among all ranks."""

    def exchange(self, sends, receives, label, *, exclusive=False):
        (one,) = sends
        peers = [part.peer for part in one.parts]
        turned = one._replace(
            parts=tuple(p._replace(peer=q) for p, q in zip(one.parts, peers[1:] + peers[:1], strict=True))
        )
        return super().exchange([turned], receives, label, exclusive=exclusive)


class SharesOwnDataOnly(TransportWrapper):
    """Return the data of this rank for all ranks, so that different calls are not detected."""

    def share(self, data, label="share", timeout=None):
        return [data] * self.size


class SharesInWrongOrder(TransportWrapper):
    """Return the shared data in another order of ranks."""

    def share(self, data, label="share", timeout=None):
        said = super().share(data, label, timeout)
        return said[1:] + said[:1]


class BeginsAnyhow(TransportWrapper):
    """Begin a pass although the last one has not ended."""

    def check_in_sync(self):
        """Check nothing."""
