"""A transport around another: everything goes through, except what a derived class overrides."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from burst_portable.comm.base import Handle, Message, Transport


class WrappedTransport(Transport):
    """See `comm.base.Transport`. The inner transport counts passes, and remembers what ranks have agreed on.

    An exchange becomes messages that are posted here.
    """

    def __init__(self, inner: Transport) -> None:
        self._inner = inner
        self.name, self.rank, self.size, self.host = inner.name, inner.rank, inner.size, inner.host
        self.lasting, self.goes_first = inner.lasting, inner.goes_first

    @property
    def passes(self) -> int:
        return self._inner.passes

    @passes.setter
    def passes(self, count: int) -> None:
        self._inner.passes = count

    @property
    def agreed(self) -> set[bytes]:
        return self._inner.agreed

    def check_in_step(self) -> None:
        self._inner.check_in_step()

    def between_passes(self) -> AbstractContextManager[None]:
        return self._inner.between_passes()

    def fall_behind(self) -> None:
        self._inner.fall_behind()

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
