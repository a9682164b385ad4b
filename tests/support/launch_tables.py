"""Make lists of disjoint tiles and their dense masks, and count the pairs that a Hopper launch table covers."""

from __future__ import annotations

import random
from collections.abc import Iterator

import numpy as np
import pytest

from burst_portable.backends.cuda.hopper.block_tables import LaunchTable
from burst_portable.backends.cuda.hopper.cuts import PassSizes
from burst_portable.layout import Segment
from burst_portable.mask import Mask
from burst_portable.planning.tiles import Tile, Tiles, find_tiles

pytest.importorskip("triton")
from burst_portable.planning.tiles import make_tile

SEQ = 700

CASES = {
    "full": [Tile(0, SEQ, 0, SEQ, -SEQ, SEQ)],
    "causal": [Tile(0, SEQ, 0, SEQ, 0, SEQ)],
    "anticausal": [Tile(0, SEQ, 0, SEQ, -SEQ, 0)],
    "window": [Tile(0, SEQ, 0, SEQ, 0, 150)],
    "short rows": [Tile(130, 200, 0, 600, -SEQ, SEQ)],
    "one pair": [Tile(300, 301, 500, 501, -200, -200)],
    "documents": [Tile(0, 100, 0, 100, 0, 99), Tile(100, 250, 100, 250, 0, 149), Tile(250, 700, 250, 700, 0, 449)],
    "sink and window": [Tile(0, SEQ, 8, SEQ, 0, 100), Tile(0, SEQ, 0, 8, 0, SEQ)],
    "long documents": [Tile(0, 90, 0, 90, 0, 89), Tile(90, 640, 90, 640, 0, 549), Tile(640, 700, 640, 700, 0, 59)],
    "a document and what all see": [Tile(0, SEQ, 0, 50, -SEQ, SEQ), Tile(77, 690, 77, 690, 0, 600)],
    "nothing": [],
}


def dense(tiles: Tiles, length: int = SEQ) -> np.ndarray:
    """Return how often the tiles contain each pair [rows, columns]."""
    seen = np.zeros((length, length), dtype=np.int8)
    rows, columns = np.arange(length)[:, None], np.arange(length)[None, :]
    for t in tiles:
        inside = (rows >= t.q_start) & (rows < t.q_stop) & (columns >= t.k_start) & (columns < t.k_stop)
        seen += inside & (rows - columns >= t.lo) & (rows - columns <= t.hi)
    return seen


def pass_sizes(length: int, heads: int, group: int = 1, dim: int = 128) -> PassSizes:
    """Return the sizes of a pass of one batch row, in which `group` query heads share a K/V head."""
    return PassSizes(1, length, length, heads, heads // group, dim, dim, processors=132)


def mask_tiles(mask: str, length: int) -> Tiles:
    """Return the tiles of a mask over one shard that holds all tokens."""
    segment = (Segment(0, length),)
    return find_tiles(Mask.parse(mask, length), segment, segment)


def walked(count: int) -> range:
    """Return the positions of the blocks of a run relative to its first one; a negative count goes down."""
    return range(count) if count >= 0 else range(0, count, -1)


def count_visits(table: LaunchTable, outer: int, inner: int, *, peel: bool, length: int = SEQ) -> np.ndarray:
    """Return how often a kernel sees each pair, with padding. With peel (forward), no row past a stop is stored."""
    seen = np.zeros((length + outer, length + 2 * inner), dtype=np.int8)
    for w in range(table.blocks):
        row = table.numbers[16 * w : 16 * w + 16]
        top, runs_at, runs, full, masked_at, masked, stop = row[:7]
        early = 0 if peel else row[8]
        block = slice(top, stop if peel else top + outer)
        pairs = [table.numbers[runs_at + 2 * r : runs_at + 2 * r + 2] for r in range(runs)]
        visited = [start + i * inner for start, count in pairs for i in walked(count)]
        assert len(visited) == full + masked
        for start in visited[early : early + full]:
            seen[block, start : start + inner] += 1
        entries = [table.numbers[masked_at + 8 * i : masked_at + 8 * i + 8] for i in range(masked)]
        assert [entry[0] for entry in entries] == visited[:early] + visited[early + full :]
        for start, in_start, in_stop, out_start, out_stop, lo, hi, _ in entries + [row[8:]] * peel:
            o, i = np.arange(block.start, block.stop)[:, None], start + np.arange(inner)[None, :]
            shown = (i >= in_start) & (i < in_stop) & (o >= out_start) & (o < out_stop)
            shown &= (o - i >= lo) & (o - i <= hi)
            seen[block, start : start + inner] += shown
    return seen


LENGTH = 600
LISTS = 60


def boxes(rng: random.Random, rows: tuple[int, int], columns: tuple[int, int], depth: int) -> Iterator[tuple[int, ...]]:
    """Generate disjoint boxes by recursive bisection, omitting some."""
    if depth == 0:
        if rng.random() < 0.75:
            yield (*rows, *columns)
        return
    first, last = (rows, columns) if rng.random() < 0.5 else (columns, rows)
    middle = rng.randint(first[0] + 1, first[1] - 1) if first[1] - first[0] > 1 else first[1]
    for part in ((first[0], middle), (middle, first[1])):
        if part[0] < part[1]:
            yield from boxes(rng, *((part, last) if first is rows else (last, part)), depth - 1)


def random_tiles(seed: int) -> tuple[Tiles, np.ndarray]:
    """Return random disjoint tiles and how often they contain each pair [rows, columns]."""
    rng = random.Random(seed)
    rows, columns = (
        rng.choice([1, 65, 256, rng.randint(2, 100), rng.randint(2, LENGTH), rng.randint(300, LENGTH)])
        for _ in range(2)
    )
    made: list[Tile] = []
    for box in boxes(rng, (0, rows), (0, columns), rng.randint(0, 4)):
        least, most = box[0] - box[3] - 1, box[1] - box[2] + 1
        edges = sorted(rng.choice([least, most, rng.randint(least, most)]) for _ in range(rng.choice([2, 2, 4])))
        bands = zip(edges[::2], edges[1::2], strict=True)
        made += [tile for first, past in bands if (tile := make_tile(*box, first, past - 1))]
    i, j = np.arange(rows)[:, None], np.arange(columns)
    seen = np.zeros((rows, columns), np.int8)
    for t in made:
        box = (i >= t.q_start) & (i < t.q_stop) & (j >= t.k_start) & (j < t.k_stop)
        seen += box & (i - j >= t.lo) & (i - j <= t.hi)
    assert seen.max(initial=0) <= 1, "the tiles are disjoint"
    return Tiles(made), seen
