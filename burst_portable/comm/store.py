"""A few bytes of every rank through a process group's store: slow, but no device takes part."""

from __future__ import annotations

import time
from datetime import timedelta

import torch.distributed as dist

from burst_portable.errors import LATE, CommunicationError, DeadlineError, PeerLostError, explain, first_line


def board_of(group: dist.ProcessGroup) -> Board:
    """The board of a group, on the store that the group was made with."""
    store = dist.PrefixStore(f"burst_portable/{group.group_name}", group.get_group_store())
    return Board(store, dist.get_rank(group), dist.get_world_size(group))


class Board:
    """Where every rank of a group posts what it says, turn after turn; the store counts each rank's turns.

    Args:
        store: shared by the ranks, and by nobody else under the same prefix.
    """

    def __init__(self, store: dist.Store, rank: int, size: int) -> None:
        self._store, self._rank, self._size = store, rank, size

    def share(self, data: bytes, what: str, deadline: float) -> list[bytes]:
        """What every rank said at this turn, in rank order.

        Raises `DeadlineError`, naming the ranks that said nothing in `deadline` seconds; `PeerLostError` if the store
        itself is gone.
        """
        until = time.monotonic() + deadline
        turn = -1  # unknown
        try:
            turn = self._store.add(f"turns/{self._rank}", 1) - 1
            self._store.set(f"{turn}/{self._rank}", data)  # type: ignore[arg-type]  # bytes need not be text
            if turn > 1:  # all ranks have spoken at the last turn, so they have read the one before
                self._store.delete_key(f"{turn - 2}/{self._rank}")
            return [self._said(f"{turn}/{rank}", until) for rank in range(self._size)]
        except RuntimeError as error:
            raise self._named(error, turn, what, deadline) from error

    def _said(self, key: str, until: float) -> bytes:
        self._store.wait([key], timedelta(seconds=max(0.001, until - time.monotonic())))
        return bytes(self._store.get(key))

    def _named(self, error: RuntimeError, turn: int, what: str, deadline: float) -> CommunicationError:
        told = first_line(error)
        try:
            silent = [rank for rank in range(self._size) if not self._store.check([f"{turn}/{rank}"])]
        except RuntimeError:
            return PeerLostError(explain(f"{what} failed", got=told, next_step="look at the output of rank 0"))
        who = ", ".join(map(str, silent)) or "the store"
        return DeadlineError(
            explain(
                f"{what}: rank {who} said nothing in {deadline:g} s",
                got=told,
                next_step=LATE,
            )
        )
