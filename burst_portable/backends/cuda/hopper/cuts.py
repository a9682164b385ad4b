"""Choose the launches of a pass of the Hopper kernels, with their configs and tables.

A cut is the config of one launch, together with the part of the work that this launch computes. The choice depends on
the tiles: the functions build a launch table and compare the length of its work rows, or predict when launches end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from burst_portable.backends.cuda.hopper.block_tables import LaunchTable, backward_table, forward_table
from burst_portable.backends.cuda.hopper.configs import (
    KEY_BLOCK,
    TALL,
    BackwardConfig,
    ForwardConfig,
    SplitConfig,
    backward_config,
    forward_config,
)
from burst_portable.backends.cuda.hopper.head_order import predict_end, side_by_side
from burst_portable.backends.cuda.hopper.ordered_tables import align_queries, divided_table, ordered_table
from burst_portable.backends.cuda.hopper.outer_blocks import Span
from burst_portable.planning.tiles import Tiles

TALL_BLOCKS = 32  # key blocks that a query block must visit on average if `TALL` is used
TALL_ITEMS = 4  # minimum of query blocks, of all heads, per multiprocessor if `TALL` is used
ROOM = 64  # key blocks, at head size 128, that a forward program visits before it ends: about 0.1 ms on one H100
LATE = 6  # a program of the backward may take at most 1/LATE of the mean work of a multiprocessor
SPLIT_LATE = 1.5  # a program of the split backward may take at most 1/1.5 of the mean work of a multiprocessor
SPLIT_ADDING = 8  # inner blocks of 64 rows in whose time a program of the split backward adds dK or dV
SPLIT_PREDICTED = 8192  # programs of the split backward up to which both ends are predicted
ADDING_PROGRAM = 2  # inner blocks in whose time a program adds dK and dV of one head, and they are cast
ADDING_LAUNCH = 5  # inner blocks in whose time gradients are cleared and cast, apart from those of programs
L2 = 48 << 20  # bytes of Q and dO that several groups of heads may read at the same time
MISSES = 1.2  # times as long a backward takes if more are read
HOST = 40  # inner blocks in whose time the host launches a backward: about 0.09 ms
FEW = 4  # a second launch may accumulate the gradients of at most 1/FEW of all keys
SEPARATE_PROGRAMS = 64  # per multiprocessor, that may write dK and dV separately: 128 KiB each with heads of 128
SEPARATE_PROGRAM = 3  # inner blocks in whose time a program writes dK and dV separately, and they are added
SEPARATE_LAUNCH = 25  # inner blocks in whose time the sums of dK and dV are launched: about 0.05 ms


@dataclass(frozen=True, slots=True)
class BackwardCut:
    """One launch of the backward.

    Attributes:
        config: Compile-time constants.
        span: Query heads that one program computes.
        keys: [start, stop) of the keys that the launch reads, and whose gradients it accumulates; None for all keys.
        ordered: Whether the additions to dQ have the order of the table, so that the result is deterministic.
        separate: Whether each program writes dK and dV of its query head in float32, to be added later.
    """

    config: BackwardConfig
    span: int
    keys: Span | None = None
    ordered: bool = False
    separate: bool = False


class PassSizes(NamedTuple):
    """Sizes on which the launches of a forward or backward pass depend.

    `rows` are queries, `heads` query heads, `processors` the multiprocessors of the device.
    """

    batch: int
    rows: int
    keys: int
    heads: int
    kv_heads: int
    dim: int
    value_dim: int
    processors: int

    @property
    def all_heads(self) -> int:
        """Query heads of all batch rows."""
        return self.batch * self.heads

    @property
    def group(self) -> int:
        """Query heads that share one K/V head."""
        return self.heads // self.kv_heads

    def heads_at_once(self, table: LaunchTable, span: int, bytes_read: int) -> int:
        """Return `side_by_side`, in units of `span` heads, for programs that compute `span` query heads each.

        Args:
            table: Work rows of each head.
            span: Query heads that one program computes.
            bytes_read: Bytes that the programs of one K/V head read from the same rows.
        """
        heads, group, everything = self.heads // span, self.group // span, self.all_heads // span
        return side_by_side(table, span, heads, group, everything, bytes_read, self.processors)

    @property
    def bytes_of_queries(self) -> int:
        """Bytes of Q and dO of the query heads that share one K/V head."""
        return self.rows * self.dim * 4 * self.group

    def few(self, keys: Span) -> bool:
        """Return whether a second launch may compute these keys."""
        return (keys[1] - keys[0]) * FEW <= self.keys

    def ends_late(self, table: LaunchTable) -> bool:
        """Return whether the last program may end much later than the rest, if each computes all heads of a group."""
        return self.longest_takes(table, LATE)

    def divided_ends_first(self, table: LaunchTable, q_block: int) -> bool:
        """Return whether programs that compute one query head each end before programs that compute a group.

        The former add dK and dV to float32 gradients, which are cleared before and cast after. The host needs longer
        for that, so they never end first if the device ends before the host. The latter take longer if the L2 does not
        hold the rows that several groups read.

        Times are in inner blocks. The constants were fitted to measurements of both on one H200: 117 rows of 2,048 to
        16,384 tokens, heads of 64 to 128, groups of 4 and 8. In none of the 93 that differed by 4 % or more was the
        slower way taken. When more heads ran at the same time, both were measured again in 21 rows with groups of 3 to
        8. The way taken is at most 1 % slower, by the median of ratios.
        """
        added = table.total + ADDING_PROGRAM * table.blocks
        divided = added * self.all_heads / self.processors + table.longest / 2 + ADDING_LAUNCH
        groups = self.heads_at_once(table, self.group, self.bytes_of_queries)
        read = groups * self.bytes_of_queries * min(1.0, table.longest * q_block / self.rows)
        misses = MISSES if groups > 1 and read > L2 else 1
        return self.predict_end(table, self.group) * misses > max(divided, HOST)

    def predict_end(self, table: LaunchTable, span: int) -> int:
        """Return when programs that compute `span` query heads of a block of keys end, in the time of inner blocks."""
        side = self.heads_at_once(table, span, self.bytes_of_queries)
        return predict_end([span * n for n in table.lengths], self.all_heads // span, side, self.processors)

    def longest_takes(self, table: LaunchTable, part: float) -> bool:
        """Return whether the longest program takes over 1/part of a multiprocessor's mean work, computing a group."""
        return table.longest * self.group * part * self.processors > table.total * self.all_heads


def forward_cut(tiles: Tiles, sizes: PassSizes, *, every_block: bool) -> tuple[ForwardConfig, LaunchTable]:
    """Return the faster config for these tiles, and its table. If `every_block`, also of blocks without visible keys.

    The thresholds were measured on one H100 (benchmarks/attention.py).
    """

    def table_of(config: ForwardConfig) -> LaunchTable:
        mebibyte = blocks_per_mebibyte(config.BN, sizes.dim)
        return forward_table(tiles, sizes.rows, 64 * config.W, config.BN, every_block, mebibyte)

    if tall := TALL.get(max(sizes.dim, sizes.value_dim)):
        table = table_of(tall)
        enough = table.blocks * sizes.all_heads >= TALL_ITEMS * sizes.processors
        if enough and table.total >= TALL_BLOCKS * table.blocks:
            return tall, table
    config = forward_config(sizes.dim, sizes.value_dim)
    return config, table_of(config)


def turns(table: LaunchTable, sizes: PassSizes) -> int:
    """Return the number of consecutive query blocks that a forward program computes before it ends.

    A kernel that sends messages can start only if a program ends. So the number is small: just large enough that the
    start of a program, about 4 us, takes a small part of its time. It is limited so that no multiprocessor is idle.
    """
    visited = table.total * sizes.dim // 128
    return max(1, min(ROOM * table.blocks // max(1, visited), table.blocks * sizes.all_heads // sizes.processors))


def blocks_per_mebibyte(keys: int, dim: int) -> int:
    """Return the number of blocks in 1 MiB, if a block contains `keys` keys and their values in 16 bits."""
    return (1 << 20) // (2 * 2 * keys * dim)


def adding_cuts(tiles: Tiles, sizes: PassSizes, *, ordered: bool = False) -> list[tuple[BackwardCut, LaunchTable]]:
    """Return the cuts and tables of launches that add to dK and dV: one, unless `ordered` (`_ordered_cuts`)."""
    if ordered:
        return _ordered_cuts(tiles, sizes, writes=False)
    config = backward_config(sizes.dim, sizes.value_dim)
    table = backward_table(tiles, sizes.rows, config.BM, KEY_BLOCK)
    return [(BackwardCut(config, 1 if sizes.ends_late(table) else sizes.group), table)]


def writing_cuts(tiles: Tiles, sizes: PassSizes, *, ordered: bool = False) -> list[tuple[BackwardCut, LaunchTable]]:
    """Return the cuts and tables of launches that write dK and dV once.

    A program computes all query heads of its keys. If a few keys, such as attention sinks, are visible to very many
    queries, their programs would end late. A second launch then divides these keys among programs and accumulates their
    gradients. An empty list means that accumulation (`adding_cuts`) is faster for all keys
    (`PassSizes.divided_ends_first`). If `ordered`, see `_ordered_cuts`.
    """
    if ordered:
        return _ordered_cuts(tiles, sizes, writes=True)
    config = backward_config(sizes.dim, sizes.value_dim)
    whole = BackwardCut(config, sizes.group)

    def table_of(tiles: Tiles, excluded: Span | None = None) -> LaunchTable:
        return backward_table(tiles, sizes.rows, config.BM, KEY_BLOCK, sizes.keys, excluded=excluded)

    def fits(table: LaunchTable) -> bool:
        if not sizes.ends_late(table):
            return True
        return table.long is None and not (sizes.group > 1 and sizes.divided_ends_first(table, config.BM))

    table = table_of(tiles)
    if fits(table):
        return [(whole, table)]
    if table.long is None or not sizes.few(table.long):
        return []
    around, seen = _around(tiles, table.long, sizes.keys)
    rest = table_of(around, excluded=table.long)
    if not fits(rest):
        return []
    divided = backward_table(seen, sizes.rows, config.BM, KEY_BLOCK, fill=(sizes.all_heads, sizes.processors))
    return [(whole, rest), (BackwardCut(config, 1, table.long), divided)]


def _ordered_cuts(tiles: Tiles, sizes: PassSizes, *, writes: bool) -> list[tuple[BackwardCut, LaunchTable]]:
    """Return the cuts and tables of launches that add to dQ in the order of their tables.

    Only one program adds to dK and dV of a key: it computes all query heads of a K/V head. The longest program then
    ends late, by half of its time on average. If others follow it (`LaunchTable.follows`), it delays them by all of its
    time. If that costs more, each query head has separate programs, which write dK and dV separately.

    A second launch divides a few keys that are visible to very many queries, and writes the gradients of each part
    separately. It needs no order if it adds once to each block of dQ.

    Args:
        tiles: Visible pairs.
        sizes: Sizes of the pass.
        writes: Whether the first launch writes dK and dV, so that all keys must be computed.
    """
    config, processors = backward_config(sizes.dim, sizes.value_dim), sizes.processors
    tiles, starts = align_queries(tiles, sizes.rows, config.BM, KEY_BLOCK)

    def table_of(tiles: Tiles, written: int, excluded: Span | None = None, later: Sequence[int] = ()) -> LaunchTable:
        return ordered_table(
            tiles, sizes.rows, config.BM, KEY_BLOCK, written, starts=starts, excluded=excluded, later=later
        )

    def cut_of(tiles: Tiles, table: LaunchTable) -> tuple[BackwardCut, LaunchTable]:
        programs = -(-sizes.keys // KEY_BLOCK) * sizes.all_heads / processors
        gain = table.longest * (sizes.group - 1) / (1 if table.follows else 2)
        if gain > SEPARATE_PROGRAM * programs + SEPARATE_LAUNCH and programs <= SEPARATE_PROGRAMS:
            return BackwardCut(config, 1, ordered=True, separate=True), table_of(tiles, sizes.keys)
        return BackwardCut(config, sizes.group, ordered=True), table

    written = sizes.keys if writes else 0
    table = table_of(tiles, written)
    if table.long is None or not sizes.few(table.long) or not sizes.longest_takes(table, SPLIT_LATE):
        return [cut_of(tiles, table)]
    around, seen = _around(tiles, table.long, sizes.keys)

    def divided_after(earlier: Sequence[int] = ()) -> LaunchTable:
        fill = sizes.all_heads, processors
        return divided_table(seen, sizes.rows, config.BM, KEY_BLOCK, fill=fill, starts=starts, earlier=earlier)

    rest = cut_of(around, table_of(around, written, table.long, divided_after().turns))
    divided = divided_after(rest[1].turns)
    return [rest, (BackwardCut(config, 1, table.long, ordered=not divided.visits_once, separate=True), divided)]


def split_divides(tiles: Tiles, sizes: PassSizes, config: SplitConfig) -> bool:
    """Return whether `split_backward` is faster if each query head has its own programs for dK and dV.

    Their sums are then added in float32. This may be so if the longest of few programs that compute whole groups of
    heads would end late. The ends of both are then predicted, up to `SPLIT_PREDICTED` programs. The constants were
    fitted to measurements of both on one H200: 37 rows of 2,048 to 16,384 tokens, heads of 160 to 256, groups of 4 and
    8. In none of them was the slower way taken.
    """
    table = backward_table(tiles, sizes.rows, config.BN, KEY_BLOCK, sizes.keys)
    if sizes.group == 1 or not sizes.longest_takes(table, SPLIT_LATE):
        return False
    programs = table.blocks * sizes.all_heads
    if programs > SPLIT_PREDICTED:
        return True
    divided = sizes.predict_end(table, 1) + SPLIT_ADDING * programs / sizes.processors
    return sizes.predict_end(table, sizes.group) > divided


def _around(tiles: Tiles, keys: Span, n_keys: int) -> tuple[Tiles, Tiles]:
    """Return the parts of the tiles without `keys`, and those with `keys`, which are numbered from 0 on."""
    start, stop = keys
    around = Tiles((*_of_keys(tiles, 0, start), *_of_keys(tiles, stop, n_keys)))
    return around, Tiles(tile.shifted(0, -start) for tile in _of_keys(tiles, start, stop))


def _of_keys(tiles: Tiles, start: int, stop: int) -> Tiles:
    """Return the parts of the tiles with keys in [start, stop)."""
    parts = (tile.clipped(tile.q_start, tile.q_stop, start, stop) for tile in tiles)
    return Tiles(part for part in parts if part is not None)
