"""Define `GradientRecords`, which a mesh holds for `burst_portable.gradients`."""

from __future__ import annotations

from functools import lru_cache
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

from torch.utils.weak import WeakTensorKeyDictionary


class GradientRecords:
    """What ranks did with gradients, by which `all_reduce_gradients` finds wrong sums.

    Attributes:
        summed: Gradients that are sums over the ranks, with their versions.
        accumulated: Gradients as backward passes left them, with their versions.
        added: Sums to which a backward pass added, with their versions, and whether they were zeroed before, as bool
            ``[]``.
        hooks: Handles of the hooks that record `added`, on a parameter of the last sum.
        averaged: Modules whose gradients are multiplied by the ranks, to be averaged.
        averaged_by_ddp: Modules of shards whose gradients DDP averages over the ranks in the backward pass.
    """

    def __init__(self) -> None:
        self.hooks: list[Any] = []
        self.summed = WeakTensorKeyDictionary()
        self.accumulated = WeakTensorKeyDictionary()
        self.added = WeakTensorKeyDictionary()
        self.averaged: WeakSet[Any] = WeakSet()
        self.averaged_by_ddp: WeakSet[Any] = WeakSet()


@lru_cache(maxsize=1)
def _records_of_groups() -> WeakKeyDictionary[Any, GradientRecords]:
    return WeakKeyDictionary()


def records_of(group: Any) -> GradientRecords:
    """Return the records of a process group. All its meshes share them: mesh=None may name the same ranks.

    None is the group of a mesh of threads, or of one rank. Such a mesh has its own records.
    """
    return GradientRecords() if group is None else _records_of_groups().setdefault(group, GradientRecords())
