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
    turns,
    writing_cuts,
)
from burst_portable.backends.cuda.hopper.launch import processors
from burst_portable.backends.cuda.hopper.tables import LaunchTable
from burst_portable.tiles import Tiles

_KEPT = 256
_L2_SHARE = 8 << 20  # bytes of K and V (backward: Q and dO) in the L2 that heads running side by side should share

C = TypeVar("C", ForwardConfig, BackwardCut)
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class OnDevice(Generic[C]):
    """What a launch needs besides its tensors.

    cut: how blocks are cut.
    numbers: the launch table's.
    grid: how many programs.
    heads: how the kernel tells heads apart: its parameters of that, in their order.
    """

    cut: C
    numbers: Tensor
    grid: tuple[int, int, int]
    heads: tuple[int, ...]


class LaunchTables:
    """What the passes of one kernel launch, by tiles, shapes and device; the oldest go first."""

    def __init__(self) -> None:
        self._made: OrderedDict[Hashable, Any] = OrderedDict()

    def forward(
        self, q: Tensor, k: Tensor, tiles: Tiles, *, every_block: bool, makes_way: bool = False
    ) -> OnDevice[ForwardConfig]:
        """See `configs.forward_cut`, and `configs.turns` for `makes_way`."""

        def made() -> OnDevice[ForwardConfig]:
            batch, rows, heads, dim = q.shape
            at_once, group = processors(q.device.index), heads // k.shape[2]
            cut, table = forward_cut(tiles, rows, dim, batch * heads, at_once, every_block=every_block)
            items = table.blocks * batch * heads
            side_by_side = _side_by_side(heads, group, k.shape[1] * dim * 4)
            in_a_row = turns(table, dim, batch * heads, at_once) if makes_way else 0
            programs = -(-items // in_a_row) if in_a_row else min(items, at_once)
            told = (items, in_a_row, heads, group, table.blocks, side_by_side)
            return OnDevice(cut, _sent(table, q.device), (programs, 1, 1), told)

        return self._kept(("forward", tiles, q.shape, k.shape, every_block, makes_way, q.device), made)

    def adding(self, q: Tensor, k: Tensor, tiles: Tiles) -> OnDevice[BackwardCut]:
        """See `configs.adding_cut`."""

        def made() -> OnDevice[BackwardCut]:
            return _backward(*adding_cut(tiles, _pass(q, k)), q, k)

        return self._kept(("adding", tiles, q.shape, k.shape, q.device), made)

    def writing(self, q: Tensor, k: Tensor, tiles: Tiles) -> tuple[OnDevice[BackwardCut], ...]:
        """See `configs.writing_cuts`."""

        def made() -> tuple[OnDevice[BackwardCut], ...]:
            return tuple(_backward(*cut, q, k) for cut in writing_cuts(tiles, _pass(q, k)))

        return self._kept(("writing", tiles, q.shape, k.shape, q.device), made)

    def _kept(self, key: Hashable, make: Callable[[], T]) -> T:
        found = self._made.get(key)
        if found is None:
            found = self._made[key] = make()
            while len(self._made) > _KEPT:
                self._made.popitem(last=False)
        made: T = found
        return made


def _backward(cut: BackwardCut, table: LaunchTable, q: Tensor, k: Tensor) -> OnDevice[BackwardCut]:
    batch, rows, heads, dim = q.shape
    group, units = heads // k.shape[2], heads // cut.span
    side_by_side = _side_by_side(units, group // cut.span, rows * dim * 4 * group)
    told = (batch * heads, heads, group, cut.span, side_by_side)
    grid = (side_by_side, table.blocks, batch * units // side_by_side)
    return OnDevice(cut, _sent(table, q.device), grid, told)


def _sent(table: LaunchTable, device: torch.device) -> Tensor:
    return torch.tensor(table.numbers, dtype=torch.int32).to(device)


def _side_by_side(heads: int, group: int, bytes_a_key_head: int) -> int:
    """How many query heads run side by side: as many as share the L2, whole groups of a K/V head, a divisor of all."""
    wanted = max(1, _L2_SHARE // max(1, bytes_a_key_head)) * group
    return max(d for d in range(1, heads + 1) if heads % d == 0 and (d <= wanted or d == 1))


def _pass(q: Tensor, k: Tensor) -> Pass:
    batch, rows, heads, dim = q.shape
    group = heads // k.shape[2]
    return Pass(rows, k.shape[1], dim, batch * heads, group, processors(q.device.index))
