"""The score matrix as characters: which pairs a mask lets through, and which rank holds the queries.

::

    00 ·  ·  ·        two characters a cell: 00 all of it is seen, 0 part of it, · nothing
    11 1  ·  ·        the digit is the rank that holds the queries of the row
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from burst_portable.layout import Layout, Segment
from burst_portable.mask import Mask
from burst_portable.tiles import find_tiles

LABELS = "0123456789abcdefghijklmnopqrstuvwxyz"
SEVERAL = "#"
_CELLS = 24
_MOST_CELLS = 32


class Cell(NamedTuple):
    """One box of the score matrix. `seen` is the share of its pairs; `rank` is None where several hold its rows."""

    rank: int | None
    seen: float

    @property
    def text(self) -> str:
        """Two characters, readable without colours."""
        if not self.seen:
            return "· "
        label = LABELS[self.rank] if self.rank is not None and self.rank < len(LABELS) else SEVERAL
        return label * 2 if self.seen == 1 else f"{label} "


def cells(length: int, ranks: int) -> list[Segment]:
    """The sequence cut into a few pieces; so that a zigzag's chunks are whole cells, where that can be."""
    chunks = 2 * ranks if 2 * ranks <= _MOST_CELLS else _CELLS
    parts = max(1, _CELLS // chunks)
    return [cell for chunk in _cut(Segment(0, length), chunks) for cell in _cut(chunk, parts)]


def _cut(whole: Segment, pieces: int) -> list[Segment]:
    """As a layout cuts: the first pieces are one longer; without those that are empty."""
    size, longer = divmod(whole.count, pieces)
    starts = [whole.start + i * size + min(i, longer) for i in range(pieces + 1)]
    return [Segment(start, stop - start) for start, stop in pairwise(starts) if start < stop]


def owner(layout: Layout, cell: Segment) -> int | None:
    """The rank that holds all positions of a cell; None if there are several."""
    for rank, segments in enumerate(layout.shards):
        held = 0
        for segment in segments:
            first, past = segment.within(cell.start, cell.start + cell.count)
            held += past - first
        if held:
            return rank if held == cell.count else None
    raise AssertionError("every position lies on some rank")


def owners(layout: Layout) -> list[int | None]:
    """The owner of each cell, in the order of the sequence."""
    return [owner(layout, cell) for cell in cells(layout.length, layout.ranks)]


def score_matrix(mask: Mask, layout: Layout) -> list[list[Cell]]:
    """Rows of cells, the first queries first."""
    pieces = cells(layout.length, layout.ranks)

    def row(queries: Segment, rank: int | None) -> list[Cell]:
        return [Cell(rank, _seen(mask, queries, keys)) for keys in pieces]

    return [row(queries, rank) for queries, rank in zip(pieces, owners(layout), strict=True)]


def several(matrix: Sequence[Sequence[Cell]]) -> bool:
    """Whether some cell holds queries of several ranks."""
    return any(cell.rank is None or cell.rank >= len(LABELS) for row in matrix for cell in row)


def _seen(mask: Mask, queries: Segment, keys: Segment) -> float:
    return find_tiles(mask, (queries,), (keys,)).area / (queries.count * keys.count)
