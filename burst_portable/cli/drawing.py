"""Draw the score matrix with characters: the visible pairs of a mask, and the rank of each query.

::

    00 ·  ·  ·        two characters per cell: 00 all pairs are visible, 0 some, · none
    11 1  ·  ·        the digit is the rank that has the queries of the row

If most rows belong to several ranks, shades show the visible share, and the ranks follow each row::

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

_LABELS = "0123456789abcdefghijklmnopqrstuvwxyz"
SEVERAL = "#"
SHADES = "░▒▓█"
"""Visible share of a cell's pairs: up to 1/3, up to 2/3, less than 1, and 1."""
_CELLS, _MIN_CELLS, _MAX_CELLS = 24, 16, 32
_MAX_RUNS = 2  # a row of cells and its ranks then fit 80 characters


class Cell(NamedTuple):
    """One box of the score matrix: the rank of its queries (None if several), and the visible share of its pairs."""

    rank: int | None
    visible: float

    @property
    def text(self) -> str:
        """Two characters, readable without colors."""
        if not self.visible:
            return "· "
        label = rank_label(self.rank)
        return label * 2 if self.visible == 1 else f"{label} "

    @property
    def shade(self) -> str:
        """Two characters for the visible share, without the rank."""
        return SHADES[int(self.visible * (len(SHADES) - 1))] * 2 if self.visible else "· "


def rank_label(rank: int | None) -> str:
    """Return the digit or letter of a rank; # for several ranks, and from rank 36."""
    return _LABELS[rank] if rank is not None and rank < len(_LABELS) else SEVERAL


def _cells(length: int, ranks: int) -> list[Segment]:
    """Split the sequence into cells. If possible, zigzag chunks contain a number of cells, or cells of chunks."""
    chunks = 2 * ranks
    if chunks > _MAX_CELLS:
        chunks = next((n for n in range(_CELLS, _MIN_CELLS - 1, -1) if chunks % n == 0), _CELLS)
    parts = max(1, _CELLS // chunks)
    return [cell for chunk in _split(Segment(0, length), chunks) for cell in _split(chunk, parts)]


def _split(segment: Segment, parts: int) -> list[Segment]:
    """Split as layouts do: the first parts may be longer by one. Empty parts are omitted."""
    size, longer = divmod(segment.count, parts)
    starts = [segment.start + i * size + min(i, longer) for i in range(parts + 1)]
    return [Segment(start, stop - start) for start, stop in pairwise(starts) if start < stop]


def cell_ranks(layout: Layout) -> list[list[int]]:
    """Return the ranks that have tokens of each cell, in the order of the sequence."""
    return [
        [
            rank
            for rank, segments in enumerate(layout.shards)
            if any(first < past for first, past in (s.within(cell.start, cell.start + cell.count) for s in segments))
        ]
        for cell in _cells(layout.length, layout.ranks)
    ]


def cell_owners(layout: Layout) -> list[int | None]:
    """Return the rank that has all tokens of each cell, in the order of the sequence; None if there are several."""
    return [ranks[0] if len(ranks) == 1 else None for ranks in cell_ranks(layout)]


def ranks_text(ranks: Sequence[int]) -> str:
    """Return ascending ranks as ``0-5, 60-63``. Only the first two ranges are written out."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1][1:] = [rank]
        else:
            runs.append([rank])
    more = ["..."] if len(runs) > _MAX_RUNS else []
    return ", ".join(["-".join(map(str, run)) for run in runs[:_MAX_RUNS]] + more)


def score_matrix(mask: Mask, layout: Layout) -> list[list[Cell]]:
    """Return the cells of each row, from the first queries to the last."""
    segments = _cells(layout.length, layout.ranks)
    return [
        [
            Cell(rank, find_tiles(mask, (queries,), (keys,)).num_pairs / (queries.count * keys.count))
            for keys in segments
        ]
        for queries, rank in zip(segments, cell_owners(layout), strict=True)
    ]


def use_shades(matrix: Sequence[Sequence[Cell]]) -> bool:
    """Return whether most rows have several ranks, so that digits would be useless."""
    return sum(rank_label(row[0].rank) == SEVERAL for row in matrix) > len(matrix) / 2
