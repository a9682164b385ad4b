"""Define a transport over another communication library, which sends only device buffers. gloo takes its place here.

`TheirBackend` does not need it: `TorchDistTransport` supports gloo.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist

from burst_portable.comm.base import Handles, Message, Transport
from burst_portable.comm.torch_dist import store_exchange
from burst_portable.errors import CommunicationTimeoutError, PeerLostError


class TheirTransport(Transport):
    """See `burst_portable.comm.base.Transport`. `timeout`: seconds that a message may take."""

    host = False  # no messages in host memory, so `share` is overridden

    def __init__(self, group: dist.ProcessGroup | None, timeout: float) -> None:
        group = group or dist.group.WORLD
        assert group is not None
        super().__init__("theirs", dist.get_rank(group), dist.get_world_size(group))
        self._group, self._timeout, self._store = group, timeout, store_exchange(group)

    def post(self, sends: Sequence[Message], receives: Sequence[Message], label: str = "") -> Handles:
        what, seconds = f"rank {self.rank}, {label}", self._timeout
        incoming = [dist.irecv(m.buffer, group=self._group, group_src=m.peer) for m in receives]
        outgoing = [dist.isend(m.buffer, group=self._group, group_dst=m.peer) for m in sends]
        return (
            [
                TheirHandle(x, f"{what}: sending to rank {m.peer}", seconds)
                for x, m in zip(outgoing, sends, strict=True)
            ],
            [
                TheirHandle(x, f"{what}: receiving from rank {m.peer}", seconds)
                for x, m in zip(incoming, receives, strict=True)
            ],
        )

    def share(self, data: bytes, label: str = "share", timeout: float | None = None) -> list[bytes]:
        with self.between_passes():
            what = f"rank {self.rank}, {label}: receiving from all ranks"
            return self._store.share(data, what, timeout or self._timeout)


class TheirHandle:
    """See `burst_portable.comm.base.Handle`."""

    def __init__(self, work: dist.Work | None, what: str, timeout: float) -> None:
        self._work, self._what, self._timeout = work, what, timeout

    def wait(self) -> None:
        """Return when the buffer may be used."""
        assert self._work is not None
        try:
            self._work.wait(timedelta(seconds=self._timeout))
        except RuntimeError as error:
            late = "timed out" in str(error).lower()
            kind = CommunicationTimeoutError if late else PeerLostError
            raise kind(f"{self._what} {'took too long' if late else 'failed'}", got=str(error)) from error
