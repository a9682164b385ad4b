"""The layouts that have names. Four ranks::

    contiguous      0000 1111 2222 3333
    zigzag          00 11 22 33 33 22 11 00      rank r holds chunks r and 2W-1-r: causal work is even
    striped         0123 0123 0123 0123          position p lies on rank p mod W
    document_zigzag a zigzag of its own for every document
    whole_documents each document on one rank, except the longest few: these are zigzags, so that work is even

Lengths that the ranks (or twice the ranks) do not divide give uneven shards; nothing is padded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from heapq import heapify, heapreplace
from itertools import pairwise

from burst_portable.errors import LayoutError, explain, shown, unknown_name
from burst_portable.layout import Layout, Segment, check_ranks, merged
from burst_portable.mask import Mask
from burst_portable.values import size

_BLOCK = 128  # rows that kernels take at once: chunks of whole blocks leave none half empty
_UNEVEN = 1.03  # the load of the busiest rank over the mean, above which another document is cut


def contiguous(length: int, ranks: int) -> Layout:
    """Rank r holds the r-th of `ranks` pieces."""
    return Layout("contiguous", length, tuple(merged([_chunk(length, ranks, r)]) for r in range(ranks)))


def zigzag(length: int, ranks: int) -> Layout:
    """Rank r holds chunks r and 2W-1-r of 2W (Zhu, ring-flash-attention; Llama 3, section 3.3.2)."""
    pieces = 2 * ranks
    return Layout(
        "zigzag",
        length,
        tuple(merged([_chunk(length, pieces, r), _chunk(length, pieces, pieces - 1 - r)]) for r in range(ranks)),
    )


def striped(length: int, ranks: int) -> Layout:
    """Rank r holds every W-th position from r (Striped Attention, arXiv 2311.09431)."""
    return Layout("striped", length, tuple((Segment(r, len(range(r, length, ranks)), ranks),) for r in range(ranks)))


def document_zigzag(cumulative: Sequence[int], ranks: int) -> Layout:
    """A zigzag of its own for every document, so that packed causal work is even."""
    pieces = 2 * ranks
    shards = []
    for rank in range(ranks):
        mine = []
        for start, stop in pairwise(cumulative):
            for piece in (rank, pieces - 1 - rank):
                chunk = _chunk(stop - start, pieces, piece)
                mine.append(Segment(start + chunk.start, chunk.count))
        shards.append(merged(mine))
    return Layout("document_zigzag", cumulative[-1], tuple(shards))


def whole_documents(cumulative: Sequence[int], ranks: int) -> Layout:
    """Documents dealt out whole, so that little is sent; as few of the longest as evenness needs are cut into zigzags.

    Documents are cut until the busiest rank has at most 3 % more than the mean, both of the pairs of a causal mask and
    of the rows, as far as some are long enough: the chunks of a cut document are whole blocks of kernels, in short
    sequences at least a sixteenth of a rank's rows. Blocks are not cut, so where ranks have less than some 8,000 rows
    more may remain. Chunks come first on their rank, side by side: what others need is one range.
    """
    longest = sorted(pairwise(cumulative), key=lambda d: (d[0] - d[1], d))
    chunk = max(1, min(_BLOCK, cumulative[-1] // (16 * ranks)))
    dealt = _evenest(longest, ranks, 2 * ranks * chunk)
    if dealt.idle:  # fewer long documents than ranks: smaller chunks are better than idle ranks
        dealt = _evenest(longest, ranks, 2 * ranks)
    return Layout("whole_documents", cumulative[-1], dealt.shards)


def _evenest(documents: Sequence[tuple[int, int]], ranks: int, shortest: int) -> _Dealt:
    """The most even way found to deal out documents; those that are cut have at least `shortest` rows."""
    most = sum(stop - start >= shortest for start, stop in documents)
    cut, best = 0, _Dealt(documents, 0, ranks)
    while best.uneven > _UNEVEN and cut < most:
        cut = min(most, cut + 1 + cut // 8)
        best = min(best, _Dealt(documents, cut, ranks), key=lambda dealt: dealt.uneven)
    return best


class _Dealt:
    """Documents dealt out to ranks: the first `cut` of them as zigzags, each of the others to the least loaded rank."""

    def __init__(self, documents: Sequence[tuple[int, int]], cut: int, ranks: int) -> None:
        self._pairs, self._rows = [0] * ranks, [0] * ranks
        self._all = sum((b - a) ** 2 for a, b in documents), sum(b - a for a, b in documents)
        chunks: list[list[Segment]] = [[] for _ in range(ranks)]
        rests: list[tuple[int, int, int]] = []  # rows past the last whole block: (start of their document, first, stop)
        for index, (start, stop) in enumerate(documents[:cut]):
            block = min(_BLOCK, (stop - start) // (2 * ranks))
            blocks = (stop - start) // block
            for turn in range(ranks):
                rank = (turn + index) % ranks  # some chunks are a block longer: spread these over the ranks
                for piece in (turn, 2 * ranks - 1 - turn):
                    chunk = _chunk(blocks, 2 * ranks, piece)
                    first, past = (start + at * block for at in (chunk.start, chunk.start + chunk.count))
                    chunks[rank].append(self._give(rank, start, first, past))
            rests.append((start, start + blocks * block, stop))
        whole: list[list[Segment]] = [[] for _ in range(ranks)]
        least = [(self._load(rank), rank) for rank in range(ranks)]
        heapify(least)
        for start, first, stop in (*rests, *((a, a, b) for a, b in documents[cut:])):
            if first < stop:
                rank = least[0][1]
                (whole if first == start else chunks)[rank].append(self._give(rank, start, first, stop))
                heapreplace(least, (self._load(rank), rank))
        self.shards = tuple(merged([*chunks[r], *sorted(whole[r], key=lambda s: s.start)]) for r in range(ranks))
        self.uneven = max(
            max(held) * ranks / every for held, every in zip((self._pairs, self._rows), self._all, strict=True)
        )
        self.idle = not all(self._rows)

    def _give(self, rank: int, start: int, first: int, past: int) -> Segment:
        """Give a rank the rows [first, past) of a document that begins at `start`; returns them."""
        self._pairs[rank] += (past - start) ** 2 - (first - start) ** 2
        self._rows[rank] += past - first
        return Segment(first, past - first)

    def _load(self, rank: int) -> int:
        """The larger of its shares of all pairs and of all rows."""
        return max(self._pairs[rank] * self._all[1], self._rows[rank] * self._all[0])


LAYOUTS: dict[str, Callable[[int, int], Layout]] = {
    "contiguous": contiguous,
    "zigzag": zigzag,
    "striped": striped,
}
OF_DOCUMENTS: dict[str, Callable[[Sequence[int], int], Layout]] = {
    "document_zigzag": document_zigzag,
    "whole_documents": whole_documents,
}
NAMES = (*LAYOUTS, *OF_DOCUMENTS)


def make_layout(name: str, length: int, ranks: int, mask: Mask | None = None) -> Layout:
    """The layout of that name; `OF_DOCUMENTS` read the documents from the mask.

    Raises `UnknownNameError` for a name that is not in `NAMES`, `InputError` for a length or a number of ranks that is
    not a size, `LayoutError` if they do not fit together or the mask lacks documents that the layout needs.
    """
    # Checked outside the cache, whose keys do not tell 1, 1.0 and True apart.
    length, ranks = size("length", length), size("ranks", ranks)
    if not isinstance(name, str) or name not in NAMES:
        raise unknown_name("layout", name, NAMES)
    if not isinstance(mask, Mask | None):
        raise LayoutError(explain("a layout reads documents from a Mask", got=shown(mask)))
    return _made(name, length, ranks, mask)


def suited(mask: Mask, length: int, ranks: int) -> Iterator[Layout]:
    """Layouts that may be the fastest for a mask; among equally fast ones, the first is taken."""
    yield make_layout("zigzag", length, ranks)
    if ranks > 1:
        yield make_layout("contiguous", length, ranks)
    if ranks > 1 and len(mask.regions) > 1:
        for name in OF_DOCUMENTS:
            try:
                yield make_layout(name, length, ranks, mask)
            except LayoutError:  # these regions are not documents, or too few
                continue


@lru_cache(maxsize=256)
def _made(name: str, length: int, ranks: int, mask: Mask | None) -> Layout:
    check_ranks(name, ranks)
    if length < ranks:
        raise LayoutError(
            explain(
                "more ranks than tokens",
                got=f"{ranks} ranks for {length} tokens",
                allowed=f"at most {length} ranks",
            )
        )
    if name in OF_DOCUMENTS:
        return OF_DOCUMENTS[name](_document_bounds(name, mask, length), ranks)
    return LAYOUTS[name](length, ranks)


def _document_bounds(name: str, mask: Mask | None, length: int) -> tuple[int, ...]:
    """Where documents begin and end: the squares on the diagonal that tile the sequence."""
    bounds = [0]
    for region in mask.regions if mask is not None else ():
        if (region.q_start, region.q_stop) != (region.k_start, region.k_stop) or region.q_start != bounds[-1]:
            break
        bounds.append(min(region.q_stop, length))
    if bounds[-1] != length:
        raise LayoutError(
            explain(
                f"the layout {name!r} needs a mask of documents that fill the sequence",
                got=f"the mask {str(mask)!r} and {length} tokens",
                next_step="pass Mask.documents(...), or use the layout 'zigzag'",
            )
        )
    return tuple(bounds)


def _chunk(length: int, pieces: int, index: int) -> Segment:
    """Piece `index` of a length; the first `length mod pieces` are one longer, so that no rank is empty."""
    size, longer = divmod(length, pieces)
    return Segment(index * size + min(index, longer), size + (index < longer))
