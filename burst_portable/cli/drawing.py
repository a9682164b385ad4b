"""The score matrix as characters: which pairs a mask lets through, and which rank holds the queries.

::

    00 ·  ·  ·        two characters a cell: 00 all of it is seen, 0 part of it, · nothing
    11 1  ·  ·        the digit is the rank that holds the queries of the row

Of so many ranks that most rows are of several, shades say how much is seen, and behind a row stand its ranks::

    ▒▒ ·  ·  ·   0-5
    ██ ▒▒ ·  ·   5-10
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from burst_portable.layout import Layout, Segment
from burst_portable.mask import Mask
from burst_portable.planning.tiles import find_tiles

LABELS = "0123456789abcdefghijklmnopqrstuvwxyz"
SEVERAL = "#"
SHADES = "░▒▓█"
"""Up to a third of a cell's pairs, up to two thirds, less than all; and all."""
_CELLS, _FEWEST_CELLS = 24, 16
_MOST_CELLS = 32
_MOST_RUNS = 2  # so that a line with its cells has 80 characters


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

    @property
    def shade(self) -> str:
        """Two characters that say how much is seen, and nothing of ranks."""
        return SHADES[int(self.seen * (len(SHADES) - 1))] * 2 if self.seen else "· "


def cells(length: int, ranks: int) -> list[Segment]:
    """The sequence cut into a few pieces; so that a zigzag's chunks are whole cells, or cells are of whole chunks,
    where that can be."""
    chunks = 2 * ranks
    if chunks > _MOST_CELLS:
        chunks = next((n for n in range(_CELLS, _FEWEST_CELLS - 1, -1) if chunks % n == 0), _CELLS)
    parts = max(1, _CELLS // chunks)
    return [cell for chunk in _cut(Segment(0, length), chunks) for cell in _cut(chunk, parts)]


def _cut(whole: Segment, pieces: int) -> list[Segment]:
    """As a layout cuts: the first pieces are one longer; without those that are empty."""
    size, longer = divmod(whole.count, pieces)
    starts = [whole.start + i * size + min(i, longer) for i in range(pieces + 1)]
    return [Segment(start, stop - start) for start, stop in pairwise(starts) if start < stop]


def holders(layout: Layout) -> list[list[int]]:
    """The ranks that hold positions of each cell, in the order of the sequence."""
    return [
        [
            rank
            for rank, segments in enumerate(layout.shards)
            if any(first < past for first, past in (s.within(cell.start, cell.start + cell.count) for s in segments))
        ]
        for cell in cells(layout.length, layout.ranks)
    ]


def owners(layout: Layout) -> list[int | None]:
    """The rank that holds all of each cell, in the order of the sequence; None if there are several."""
    return [ranks[0] if len(ranks) == 1 else None for ranks in holders(layout)]


def ranks_text(ranks: Sequence[int]) -> str:
    """Ranks in order, in a few characters: ``0-5, 60-63``; of more than a few runs the first, and dots."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1][1:] = [rank]
        else:
            runs.append([rank])
    told = ["-".join(map(str, run)) for run in runs[:_MOST_RUNS]]
    return ", ".join([*told, *(["..."] if len(runs) > _MOST_RUNS else [])])


def score_matrix(mask: Mask, layout: Layout) -> list[list[Cell]]:
    """Rows of cells, the first queries first."""
    pieces = cells(layout.length, layout.ranks)

    def row(queries: Segment, rank: int | None) -> list[Cell]:
        return [Cell(rank, _seen(mask, queries, keys)) for keys in pieces]

    return [row(queries, rank) for queries, rank in zip(pieces, owners(layout), strict=True)]


def several(matrix: Sequence[Sequence[Cell]]) -> bool:
    """Whether some cell holds queries of several ranks."""
    return any(cell.rank is None or cell.rank >= len(LABELS) for row in matrix for cell in row)


def crowded(matrix: Sequence[Sequence[Cell]]) -> bool:
    """Whether most rows have no digit, so that digits say next to nothing."""
    nameless = [row[0].rank is None or row[0].rank >= len(LABELS) for row in matrix]
    return sum(nameless) > len(matrix) / 2


def _seen(mask: Mask, queries: Segment, keys: Segment) -> float:
    return find_tiles(mask, (queries,), (keys,)).num_pairs / (queries.count * keys.count)
