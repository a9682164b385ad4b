"""Launch tables on their device: made once for a list of tiles and shapes, and kept."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from burst_portable.backends.cuda.hopper.configs import (
    BackwardCut,
    ForwardConfig,
    Pass,
    adding_cut,
    forward_cut,
    writing_cuts,
)
from burst_portable.backends.cuda.hopper.launch import processors
from burst_portable.backends.cuda.hopper.tables import LaunchTable
from burst_portable.tiles import Tiles

_KEPT = 256

C = TypeVar("C", ForwardConfig, BackwardCut)
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class OnDevice(Generic[C]):
    """A launch table's numbers, its outer blocks, and the cut that it is for."""

    cut: C
    numbers: Tensor
    blocks: int


class LaunchTables:
    """What the passes of one kernel launch, by tiles, shapes and device; the oldest go first."""

    def __init__(self) -> None:
        self._made: OrderedDict[Hashable, Any] = OrderedDict()

    def forward(self, q: Tensor, tiles: Tiles, *, every_block: bool) -> OnDevice[ForwardConfig]:
        """See `configs.forward_cut`."""
        batch, rows, heads, dim = q.shape
        heads *= batch

        def made() -> OnDevice[ForwardConfig]:
            at_once = processors(q.device.index)
            return _on_device(*forward_cut(tiles, rows, dim, heads, at_once, every_block=every_block), q.device)

        return self._kept(("forward", tiles, rows, dim, heads, every_block, q.device), made)

    def adding(self, q: Tensor, k: Tensor, tiles: Tiles) -> OnDevice[BackwardCut]:
        """See `configs.adding_cut`."""

        def made() -> OnDevice[BackwardCut]:
            return _on_device(*adding_cut(tiles, _pass(q, k)), q.device)

        return self._kept(("adding", tiles, q.shape, k.shape, q.device), made)

    def writing(self, q: Tensor, k: Tensor, tiles: Tiles) -> tuple[OnDevice[BackwardCut], ...]:
        """See `configs.writing_cuts`."""

        def made() -> tuple[OnDevice[BackwardCut], ...]:
            return tuple(_on_device(*cut, q.device) for cut in writing_cuts(tiles, _pass(q, k)))

        return self._kept(("writing", tiles, q.shape, k.shape, q.device), made)

    def _kept(self, key: Hashable, make: Callable[[], T]) -> T:
        found = self._made.get(key)
        if found is None:
            found = self._made[key] = make()
            while len(self._made) > _KEPT:
                self._made.popitem(last=False)
        made: T = found
        return made


def _on_device(cut: C, table: LaunchTable, device: torch.device) -> OnDevice[C]:
    return OnDevice(cut, torch.tensor(table.numbers, dtype=torch.int32).to(device), table.blocks)


def _pass(q: Tensor, k: Tensor) -> Pass:
    batch, rows, heads, dim = q.shape
    group = heads // k.shape[2]
    return Pass(rows, k.shape[1], dim, batch * heads, group, processors(q.device.index))
