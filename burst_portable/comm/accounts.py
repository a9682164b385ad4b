"""What went wrong elsewhere: when a transfer fails, a rank leaves a note in the store and reads those of the others.

A rank sees only that a neighbour is late or gone; often that neighbour gave up because of a third rank, or waits in
another group. Nothing is written while all is well: a store may be a file, which grows with every note.
"""

from __future__ import annotations

import threading
from time import monotonic

import torch.distributed as dist

from burst_portable.background import Background
from burst_portable.units import rank_names

_PATIENCE = 2.0  # seconds: for notes of others, and for a store whose host may be the rank that is gone
_POLL = 0.05
_LONGEST = 400  # characters of a note
_MOST = 8  # notes that an error shows


def compare_accounts(group: dist.ProcessGroup, mine: str) -> str:
    """Leave `mine` for the other ranks of the group; returns, in one line, what they left or that they left nothing.

    Takes a few seconds at most. Empty if the store cannot be reached, or the group has one rank.
    """
    try:
        ranks = dist.get_process_group_ranks(group)
    except KeyError:  # torch has forgotten it
        return "this rank has destroyed the process group: make a new Mesh of an existing one"
    place = f"{mine[:_LONGEST]} [group {group.group_name}: {rank_names(ranks)}]"
    asking = _Asking(ranks, place)
    # A store blocks for minutes if its host is stopped: then what has been read so far must do.
    asking.thread.wake(asking)
    asking.over.wait(_PATIENCE + 1)
    told = asking.told
    if not told:
        return ""
    others = [(r, told.get(global_rank, "")) for r, global_rank in enumerate(ranks) if global_rank != dist.get_rank()]
    heard = [text for _, text in others if text][:_MOST]
    silent = [r for r, text in others if not text]
    return "; ".join([*heard, *([f"nothing is heard of {rank_names(silent)}"] if silent else [])])


class _Asking:
    """Leaves this rank's note, and fills `told` with the notes in the store, by global rank."""

    def __init__(self, ranks: list[int], text: str) -> None:
        self._ranks, self._text = ranks, text
        self.told: dict[int, str] = {}
        self.over = threading.Event()
        self.thread = Background(self, _Asking._run, "accounts of a fault")

    def _run(self) -> None:
        """Read notes until all ranks have left one or patience ends."""
        try:
            if (world := dist.group.WORLD) is not None:  # else this rank has left the group by now
                self._ask(world.get_group_store(), dist.get_rank())
        except RuntimeError:  # DistStoreError and the like: the store went away with its host
            return
        finally:
            self.over.set()

    def _ask(self, store: dist.Store, mine: int) -> None:
        keys = {rank: f"burst_portable/account/{rank}" for rank in self._ranks}
        until = monotonic() + _PATIENCE
        store.set(keys[mine], self._text)
        self.told[mine] = self._text
        while len(self.told) < len(keys) and monotonic() < until:
            for rank in self._ranks:
                if rank not in self.told and store.check([keys[rank]]):
                    self.told[rank] = store.get(keys[rank]).decode(errors="replace")
            if not self.thread.pause(_POLL):
                return
