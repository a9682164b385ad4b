"""Banded boxes: what tiles are made from. Plain tuples, since several are made and fused for each tile that stays.

Disjoint boxes are fused if their union is again a banded box::

    ◣           rows of a chunk, and of the next one: the first sees itself, the second sees all of the first, and
    ■   ◣       itself; three boxes with the band i >= j, one box with that band
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from burst_portable.regions import band_area

Box = tuple[int, int, int, int, int, int]
"""q_start, q_stop, k_start, k_stop, lo, hi: see `tiles.Tile`."""
_Piece = tuple[Box, int]
"""A box and its area."""
_FUSE_PAIRWISE = 16  # with more, only neighbours are tried: hundreds of documents do not fuse anyway


def make_box(q_start: int, q_stop: int, k_start: int, k_stop: int, lo: int, hi: int) -> Box | None:
    """The part of a box that a band lets through, without empty rows and columns; None if nothing is seen."""
    # Comparisons, where min and max would be calls: this runs for every region of every pair of blocks.
    least, most = q_start - k_stop + 1, q_stop - 1 - k_start
    if lo < least:
        lo = least
    if hi > most:
        hi = most
    if lo > hi or q_start >= q_stop or k_start >= k_stop:
        return None
    top, bottom, left, right = k_start + lo, k_stop + hi, q_start - hi, q_stop - lo
    return (
        top if top > q_start else q_start,
        bottom if bottom < q_stop else q_stop,
        left if left > k_start else k_start,
        right if right < k_stop else k_stop,
        lo,
        hi,
    )


def box_area(box: Box) -> int:
    """Pairs that it holds."""
    q_start, q_stop, k_start, k_stop, lo, hi = box
    offset = q_start - k_start
    return band_area(q_stop - q_start, k_stop - k_start, lo - offset, hi - offset)


def fused(boxes: Sequence[Box]) -> list[Box]:
    """The same pairs in fewer boxes, where the union of some is itself a banded box.

    Boxes are disjoint, so if the smallest banded box around some has the sum of their areas, it is their union.
    """
    pieces = [(box, box_area(box)) for box in boxes]
    if len(pieces) < 2:
        return list(boxes)
    if whole := _union(boxes, sum(area for _, area in pieces)):
        return [whole[0]]
    pieces.sort(key=_corner)
    if len(pieces) > _FUSE_PAIRWISE:
        return list(_fused_neighbours(pieces))
    index = 0
    while index < len(pieces):
        for other in range(index + 1, len(pieces)):
            if joined := _union_of_two(pieces[index], pieces[other]):
                del pieces[other]
                pieces[index] = joined
                index = -1  # a larger one may fit what was tried before
                break
        index += 1
    return [box for box, _ in pieces]


def _fused_neighbours(pieces: Sequence[_Piece]) -> Iterator[Box]:
    """Each box fused with the ones right after it, as long as they fit."""
    last = pieces[0]
    for piece in pieces[1:]:
        if joined := _union_of_two(last, piece):
            last = joined
        else:
            yield last[0]
            last = piece
    yield last[0]


def _union_of_two(piece: _Piece, later: _Piece) -> _Piece | None:
    """The union of two boxes sorted by rows. Most pairs, such as two documents, are ruled out by one comparison."""
    (_, q_stop, _, k_stop, _, _), (q_start, _, k_start, _, _, hi) = piece[0], later[0]
    if q_start >= q_stop and k_start >= k_stop and q_start - k_start < hi:
        return None  # left of the later one's first pair is a pair of neither, which a box around both would hold
    return _union((piece[0], later[0]), piece[1] + later[1])


def _union(boxes: Sequence[Box], area: int) -> _Piece | None:
    """The banded box that is exactly the union of these disjoint ones, which hold `area` pairs in all; or None."""
    q_starts, q_stops, k_starts, k_stops, los, his = zip(*boxes, strict=True)
    box = make_box(min(q_starts), max(q_stops), min(k_starts), max(k_stops), min(los), max(his))
    assert box is not None, "none of them is empty"
    return (box, area) if box_area(box) == area else None


def _corner(piece: _Piece) -> tuple[int, int]:
    return piece[0][0], piece[0][2]
