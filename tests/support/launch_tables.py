"""Make random lists of disjoint tiles, and count the pairs that a launch table of the Hopper kernels covers."""

from __future__ import annotations

import random
from collections.abc import Iterator

import numpy as np
import pytest

from burst_portable.backends.cuda.hopper.block_tables import LaunchTable
from burst_portable.planning.tiles import Tile, Tiles

pytest.importorskip("triton")
from burst_portable.planning.tiles import make_tile

SEQ = 700


def count_visits(table: LaunchTable, outer: int, inner: int, *, peel: bool, length: int = SEQ) -> np.ndarray:
    """Return how often a kernel sees each pair, with padding. With peel (forward), no row past a stop is stored."""
    seen = np.zeros((length + outer, length + 2 * inner), dtype=np.int8)
    for w in range(table.blocks):
        row = table.numbers[16 * w : 16 * w + 16]
        top, runs_at, runs, full, masked_at, masked, stop = row[:7]
        early = 0 if peel else row[8]
        block = slice(top, stop if peel else top + outer)
        pairs = [table.numbers[runs_at + 2 * r : runs_at + 2 * r + 2] for r in range(runs)]
        visited = [start + i * inner for start, count in pairs for i in range(count)]
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
