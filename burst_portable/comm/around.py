"""A transport around another one, for those that change some of it: the profiler, an ablation, a benchmark."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from burst_portable.comm.base import Exchange, Handle, Message, Transport


class Around(Transport):
    """Hands everything on to `inner`."""

    def __init__(self, inner: Transport) -> None:
        self.inner = inner
        self.name, self.rank, self.size, self.host = inner.name, inner.rank, inner.size, inner.host
        self.direct, self.lasting = inner.direct, inner.lasting

    @property
    def passes(self) -> int:  # type: ignore[override]
        """Counted by the inner one, which outlives this one."""
        return self.inner.passes

    @passes.setter
    def passes(self, count: int) -> None:
        self.inner.passes = count

    @property
    def agreed(self) -> set[bytes]:
        return self.inner.agreed

    def begin(self, digest: bytes = b"", inbox: int = 0) -> None:
        self.inner.begin(digest, inbox)

    def end(self) -> None:
        self.inner.end()

    def post(
        self, sends: Sequence[Message], receives: Sequence[Message], label: str = ""
    ) -> tuple[list[Handle], list[Handle]]:
        return self.inner.post(sends, receives, label)

    def buffer(self, size: int, device: torch.device) -> Tensor:
        return self.inner.buffer(size, device)

    def inbox(self, size: int, device: torch.device, peer: int, place: int | None = None) -> Tensor:
        return self.inner.inbox(size, device, peer, place)

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message], label: str) -> Exchange:
        return self.inner.exchange(sends, receives, label)

    def share(self, data: bytes, label: str = "share", deadline: float | None = None) -> list[bytes]:
        return self.inner.share(data, label, deadline)

    def close(self) -> None:
        self.inner.close()
