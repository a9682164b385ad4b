"""Build launches without their tensors, which calls with equal tiles and sizes share: configs, tables, grids.

`cuts` chooses the launches of a pass. Here their tables are copied to the device, and their grids are computed.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from functools import cache
from typing import Generic, TypeVar

import torch
from torch import Tensor

from burst_portable.backends.cuda.driver import Bound
from burst_portable.backends.cuda.hopper.block_tables import LaunchTable, backward_table
from burst_portable.backends.cuda.hopper.configs import KEY_BLOCK, ForwardConfig, SplitConfig
from burst_portable.backends.cuda.hopper.cuts import (
    BackwardCut,
    PassSizes,
    adding_cuts,
    forward_cut,
    turns,
    writing_cuts,
)
from burst_portable.backends.cuda.hopper.outer_blocks import Span
from burst_portable.kernels.triton.arguments import LOG2_E
from burst_portable.planning.call import AttentionCall
from burst_portable.planning.tiles import Tile, Tiles
from burst_portable.utils.cache import Cache

_BOUND = 512  # maximum number of combinations of tensors for which a prepared launch is bound; 2 to 3 KB each
ROWS_OF_TERMS = 64  # queries whose row terms a program of `row_terms_kernel` computes

ABSENT_PROCESSORS = 132
"""Multiprocessors of an H100 SXM or H200, for which tensors of the device "meta" are compiled.

With another number, a few calls choose other blocks (`cuts.forward_cut`, `cuts.adding_cuts`).
"""


@cache
def processors(device: int | None) -> int:
    """Return the number of multiprocessors of a device. None is torch's device "meta"."""
    return ABSENT_PROCESSORS if device is None else torch.cuda.get_device_properties(device).multi_processor_count


C = TypeVar("C", ForwardConfig, BackwardCut, SplitConfig)


@dataclass(frozen=True, slots=True)
class PreparedLaunch(Generic[C]):
    """Arguments of a launch, except its tensors. A kernel keeps them for calls with equal tiles and sizes.

    Attributes:
        cut: Block sizes and other compile-time constants. A `BackwardCut` also defines the query heads per program and
            the keys that the launch computes.
        table: The int32 values of a `LaunchTable`, on the device. They list the blocks that each program computes.
        grid: Number of programs along x, y and z.
        heads: The kernel's arguments that map a program to a head, in the order of its signature.
        turns: int32 `LaunchTable.turns`, if additions to dQ are ordered.
        cleared: int32 per `ROWS_OF_TERMS` queries, if additions to dQ are ordered: 1 if `LaunchTable.cleared` has one.
        parts: See `LaunchTable`.
        bound: The launch itself and those that belong to it, with packed parameters, by everything that `placed`
            returns. Their other parameters depend on the tiles and the sizes, by which kernels find a prepared launch.
            `table` must live as long as they do.
    """

    cut: C
    table: Tensor
    grid: tuple[int, int, int]
    heads: tuple[int, ...]
    turns: Tensor | None = None
    cleared: Tensor | None = None
    parts: tuple[tuple[Span, int], ...] = ()
    bound: Cache[Hashable, tuple[Bound, ...]] = field(default_factory=lambda: Cache(_BOUND), compare=False)


def placed(call: AttentionCall, *tensors: Tensor) -> Hashable:
    """Return the numbers of a call, and the address, the strides and the dtype of each tensor of its launches."""
    return call.scale, call.softcap, *[part for x in tensors for part in (x.data_ptr(), x.stride(), x.dtype)]


def score_factor(call: AttentionCall) -> float:
    """Return the factor from QKᵀ to the exponent of 2 in the softmax or, with a softcap, in its tanh."""
    return call.scale * LOG2_E if call.softcap is None else 2.0 * call.scale / call.softcap * LOG2_E


def sizes_of(q: Tensor, k: Tensor, v: Tensor) -> PassSizes:
    """Return the sizes of a pass over these tensors."""
    batch, rows, heads, dim = q.shape
    return PassSizes(batch, rows, k.shape[1], heads, k.shape[2], dim, v.shape[3], processors(q.device.index))


def build_forward_launch(
    tiles: Tiles, sizes: PassSizes, device: torch.device, every_block: bool, yields_to_comm: bool
) -> PreparedLaunch[ForwardConfig]:
    """Return the launch of the forward (`cuts.forward_cut`).

    If `yields_to_comm`, each program ends after a few items (`cuts.turns`). Otherwise programs run until no item is
    left.
    """
    cut, table = forward_cut(tiles, sizes, every_block=every_block)
    items = table.blocks * sizes.all_heads
    side = sizes.heads_at_once(table, 1, sizes.keys * sizes.dim * 4)
    in_a_row = turns(table, sizes) if yields_to_comm else 0
    programs = -(-items // in_a_row) if in_a_row else min(items, sizes.processors)
    heads = (items, in_a_row, sizes.heads, sizes.group, table.blocks, side)
    return PreparedLaunch(cut, _upload(table, device), (programs, 1, 1), heads)


def build_adding_launches(
    tiles: Tiles, sizes: PassSizes, device: torch.device, ordered: bool
) -> tuple[PreparedLaunch[BackwardCut], ...]:
    """Return the launches of the backward that add to dK and dV (`cuts.adding_cuts`)."""
    return tuple(_build_backward_launch(*cut, sizes, device) for cut in adding_cuts(tiles, sizes, ordered=ordered))


def build_writing_launches(
    tiles: Tiles, sizes: PassSizes, device: torch.device, ordered: bool
) -> tuple[PreparedLaunch[BackwardCut], ...]:
    """Return the launches of the backward that write dK and dV (`cuts.writing_cuts`)."""
    return tuple(_build_backward_launch(*cut, sizes, device) for cut in writing_cuts(tiles, sizes, ordered=ordered))


def _build_backward_launch(
    cut: BackwardCut, table: LaunchTable, sizes: PassSizes, device: torch.device
) -> PreparedLaunch[BackwardCut]:
    """Return the launch for one cut of the backward and its table."""
    heads, group, span = sizes.heads, sizes.group, cut.span
    side = sizes.heads_at_once(table, span, sizes.bytes_of_queries)
    grid = (side, table.blocks, sizes.all_heads // span // side)
    arguments = (sizes.all_heads, heads, group, 1 if cut.separate else group, span, side)
    first_turns = cleared = None
    if cut.ordered:
        first_turns = torch.tensor(table.turns, dtype=torch.int32).to(device)
        parts = {
            part for start, stop in table.cleared for part in range(start // ROWS_OF_TERMS, -(-stop // ROWS_OF_TERMS))
        }
        marks = [int(part in parts) for part in range(-(-(sizes.rows + cut.config.BM) // ROWS_OF_TERMS))]
        cleared = torch.tensor(marks, dtype=torch.int32).to(device)
    return PreparedLaunch(cut, _upload(table, device), grid, arguments, first_turns, cleared, table.parts)


def build_split_launch(
    tiles: Tiles, sizes: PassSizes, device: torch.device, gradient: int, config: SplitConfig, whole: bool
) -> PreparedLaunch[SplitConfig]:
    """Return the launch of `split_backward` for one gradient: DQ, DK or DV.

    If `whole`, one program computes dK or dV of a block for all query heads of the K/V head, else for one.
    """
    heads, group = sizes.heads, sizes.group
    if gradient == 0:  # outer blocks of queries, inner blocks of keys
        turned = Tiles(Tile(t.k_start, t.k_stop, t.q_start, t.q_stop, -t.hi, -t.lo) for t in tiles)
        table = backward_table(turned, -1, config.BN, KEY_BLOCK, sizes.rows)
        span, read = 1, sizes.keys * sizes.dim * 4
    else:
        table = backward_table(tiles, sizes.rows, config.BN, KEY_BLOCK, sizes.keys)
        span, read = group if whole else 1, sizes.bytes_of_queries
    side = sizes.heads_at_once(table, span, read)
    grid = (side, table.blocks, sizes.all_heads // span // side)
    return PreparedLaunch(config, _upload(table, device), grid, (sizes.all_heads, heads, group, span, side))


def _upload(table: LaunchTable, device: torch.device) -> Tensor:
    """Copy the int32 values of a table to the device."""
    return torch.tensor(table.numbers, dtype=torch.int32).to(device)
