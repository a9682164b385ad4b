"""Tiles as calls of `npu_fusion_attention`: which sparse mode says what a tile says.

With rows i and columns j counted from the corner of a box of Sq rows and Sk columns, the operator's documentation
(torch_npu.npu_fusion_attention, `sparse_mode`) has::

    no atten_mask      full          every pair, whatever the mode says
    2  left-up         ◣             j <= i                      atten_mask: 2048 x 2048, True above the diagonal
    3  right-down      ▙             j <= i + (Sk - Sq)          the same one
    4  band            ▚             i + (Sk - Sq) - pre <= j <= i + (Sk - Sq) + next      the same one

Its conditions on a band (pre + next >= 0, -next < Sk, -pre < Sq) say that the band crosses the box, and a tile has no
empty row or column; so every tile is one of the four, and none needs a dense mask. The other modes say nothing more:
1 is a dense mask; 5 and 6 are prefixes, which are two tiles here; 7 and 8 are sequences cut between devices.

Tiles of one mode that share no rows and no columns (documents) go into one call of the layout TND, whose
`actual_seq_qlen` and `actual_seq_kvlen` are running totals of their lengths.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import lru_cache
from itertools import chain
from typing import NamedTuple

from burst_portable.tiles import Tile, Tiles

UNLIMITED = 2**31 - 1
"""The operator's own default of pre_tockens and next_tockens."""
LONGEST = 1_000_000
"""Rows or columns of a call ("1M" in the documentation), and the tokens of a packed one."""
SEQUENCES = 1000
"""Sequences of a packed call ("1K")."""

FULL, LEFT_UP, RIGHT_DOWN, BAND = 0, 2, 3, 4


class Sparse(NamedTuple):
    """`sparse_mode`, `pre_tockens`, `next_tockens`; the mode `FULL` goes without a mask."""

    mode: int
    pre: int = UNLIMITED
    next: int = UNLIMITED


class Call(NamedTuple):
    """One call of the operator: tiles in rising order of rows and of columns, of one mode."""

    tiles: tuple[Tile, ...]
    sparse: Sparse

    @property
    def rows(self) -> tuple[tuple[int, int], ...]:
        """[start, stop) of the rows, neighbours joined."""
        return _joined((tile.q_start, tile.q_stop) for tile in self.tiles)

    @property
    def columns(self) -> tuple[tuple[int, int], ...]:
        """[start, stop) of the columns, neighbours joined."""
        return _joined((tile.k_start, tile.k_stop) for tile in self.tiles)

    def lengths(self, batch: int) -> tuple[list[int], list[int]]:
        """Running totals of rows and of columns, every tile of one batch row after the other."""
        q, k = [t.rows for t in self.tiles] * batch, [t.columns for t in self.tiles] * batch
        return _totals(q), _totals(k)


def sparse_of(tile: Tile) -> Sparse:
    """The mode that shows the pairs of a tile, and no others."""
    if tile.full:
        return Sparse(FULL)
    corner = tile.q_start - tile.k_start
    lo, hi = tile.lo - corner, tile.hi - corner  # lo <= i - j <= hi
    longer = tile.rows - tile.columns
    open_below, open_above = hi >= tile.rows - 1, lo <= 1 - tile.columns
    if open_below and lo == longer:
        return Sparse(RIGHT_DOWN)
    if open_below and lo == 0:
        return Sparse(LEFT_UP)
    return Sparse(BAND, UNLIMITED if open_below else hi - longer, UNLIMITED if open_above else longer - lo)


@lru_cache(maxsize=1024)
def lower(tiles: Tiles, batch: int) -> tuple[Call, ...]:
    """The calls that tiles take."""
    calls: list[list[Tile]] = []
    modes: list[Sparse] = []
    for tile in chain.from_iterable(map(_cut, tiles)):
        sparse = sparse_of(tile)
        for call, mode in zip(calls, modes, strict=True):
            if mode == sparse and _fits(call, tile, batch):
                call.append(tile)
                break
        else:
            calls.append([tile])
            modes.append(sparse)
    return tuple(Call(tuple(call), mode) for call, mode in zip(calls, modes, strict=True))


def _cut(tile: Tile) -> Iterator[Tile]:
    """Parts that are not longer than the operator takes."""
    for row in range(tile.q_start, tile.q_stop, LONGEST):
        for column in range(tile.k_start, tile.k_stop, LONGEST):
            if part := tile.clipped(row, row + LONGEST, column, column + LONGEST):
                yield part


def _fits(call: list[Tile], tile: Tile, batch: int) -> bool:
    """Whether a tile may join a call: behind all that is in it, and the call stays small enough."""
    last, count = call[-1], len(call) + 1
    rows = sum(t.rows for t in call) + tile.rows
    columns = sum(t.columns for t in call) + tile.columns
    behind = tile.q_start >= last.q_stop and tile.k_start >= last.k_stop
    return behind and count * batch <= SEQUENCES and max(rows, columns) * batch <= LONGEST


def _joined(ranges: Iterable[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    joined: list[tuple[int, int]] = []
    for start, stop in ranges:
        if joined and joined[-1][1] == start:
            joined[-1] = joined[-1][0], stop
        else:
            joined.append((start, stop))
    return tuple(joined)


def _totals(lengths: list[int]) -> list[int]:
    totals, total = [], 0
    for length in lengths:
        total += length
        totals.append(total)
    return totals
