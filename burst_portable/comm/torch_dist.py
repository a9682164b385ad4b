"""Point to point through torch.distributed: NCCL, RCCL, HCCL, gloo.

Moves of one post go out together: in one batch where the process group launches kernels for them (so that no order
of sends and receives can lock), one by one where it has threads of its own.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from burst_portable.comm.base import Handle, Message, Transport
from burst_portable.errors import CommunicationError, DeadlineError, PeerLostError, explain


class _Transfer:
    """A torch work with names for its errors."""

    def __init__(self, works: Sequence[dist.Work], what: str, deadline: float | None) -> None:
        self._works, self._what, self._deadline = works, what, deadline

    def wait(self) -> None:
        try:
            for work in self._works:
                if self._deadline is None:
                    work.wait()
                else:
                    work.wait(timedelta(seconds=self._deadline))
        except RuntimeError as error:
            raise _named(error, self._what) from error


def _named(error: RuntimeError, what: str) -> CommunicationError:
    """torch's error as ours: too late, or gone."""
    told = re.sub(r"^\[\S+\] ", "", str(error).splitlines()[0]).partition(". This is typically")[0]
    if "timed out" in told.lower() or "timeout" in told.lower():
        return DeadlineError(
            explain(
                f"{what} took too long", got=told, next_step="find out what that rank is doing, or raise the deadline"
            )
        )
    return PeerLostError(explain(f"{what} failed", got=told, next_step="look at the output of that rank"))


class TorchDistTransport(Transport):
    """See `comm.base.Transport`.

    Args:
        group: a process group of torch.distributed; None for the default one.
        name: what the group speaks, for reports: "gloo", "nccl", "rccl", "hccl".
        batched: whether moves are launched as one batch.
        deadline: seconds a transfer may take; None leaves it to the group's own timeout.
    """

    def __init__(
        self, group: dist.ProcessGroup | None, name: str, *, batched: bool, deadline: float | None = None
    ) -> None:
        self.group = group if group is not None else dist.group.WORLD
        self.name, self._batched, self._deadline = name, batched, deadline
        self.rank, self.size = dist.get_rank(self.group), dist.get_world_size(self.group)
        self.host = not batched

    def post(
        self, sends: Sequence[Message], receives: Sequence[Message], label: str = ""
    ) -> tuple[list[Handle], list[Handle]]:
        try:
            return self._batch(sends, receives, label) if self._batched else self._each(sends, receives, label)
        except RuntimeError as error:
            raise _named(error, f"rank {self.rank}, {label}: starting a transfer") from error

    def share(self, data: bytes, label: str = "share", deadline: float | None = None) -> list[bytes]:
        mine = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        parts = [torch.empty_like(mine) for _ in range(self.size)]
        what = f"rank {self.rank}, {label}: hearing from all ranks"
        try:
            work = dist.all_gather(parts, mine, group=self.group, async_op=True)
        except RuntimeError as error:
            raise _named(error, what) from error
        assert work is not None, "this rank is a member of its group"
        _Transfer([work], what, self._deadline if deadline is None else deadline).wait()
        return [bytes(part.numpy()) for part in parts]

    def _batch(
        self, sends: Sequence[Message], receives: Sequence[Message], label: str
    ) -> tuple[list[Handle], list[Handle]]:
        ops = [dist.P2POp(dist.isend, m.buffer, group=self.group, group_peer=m.peer) for m in sends]
        ops += [dist.P2POp(dist.irecv, m.buffer, group=self.group, group_peer=m.peer) for m in receives]
        works = dist.batch_isend_irecv(ops) if ops else []
        peers = sorted({m.peer for m in (*sends, *receives)})
        transfer = _Transfer(works, f"rank {self.rank}, {label}: exchange with ranks {peers}", None)
        return [transfer] * len(sends), [transfer] * len(receives)

    def _each(
        self, sends: Sequence[Message], receives: Sequence[Message], label: str
    ) -> tuple[list[Handle], list[Handle]]:
        def handle(work: dist.Work | None, what: str) -> Handle:
            assert work is not None, "this rank is a member of its group"
            return _Transfer([work], f"rank {self.rank}, {label}: {what}", self._deadline)

        incoming = [
            handle(dist.irecv(m.buffer, group=self.group, group_src=m.peer), f"receiving from rank {m.peer}")
            for m in receives
        ]
        outgoing = [
            handle(dist.isend(m.buffer, group=self.group, group_dst=m.peer), f"sending to rank {m.peer}") for m in sends
        ]
        return outgoing, incoming
