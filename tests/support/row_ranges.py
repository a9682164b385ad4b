"""A layout of scattered chunks and masks under which a rank needs several separate ranges of another rank's rows."""

from __future__ import annotations

import random

from burst_portable.layout import Layout, Segment, merged
from burst_portable.mask import Mask, Region

LENGTH = 107


def scattered(ranks: int, seed: int = 1) -> Layout:
    """Return a layout that gives chunks of 1 to 8 tokens to ranks at random."""
    choose = random.Random(seed)
    shards: list[list[Segment]] = [[] for _ in range(ranks)]
    start = 0
    while start < LENGTH:
        count = min(choose.randint(1, 8), LENGTH - start)
        shards[choose.randrange(ranks)].append(Segment(start, count))
        start += count
    return Layout("scattered", LENGTH, tuple(map(merged, shards)))


def sparse(block: int, share: float, *, earlier: bool = False) -> Mask:
    """Return a block-sparse mask: the blocks of the diagonal, and others at random. `earlier`: only earlier ones."""
    choose = random.Random(2)
    starts = range(0, LENGTH, block)
    chosen = [(q, k) for q in starts for k in starts if q == k or (choose.random() < share and not (earlier and k > q))]
    regions = (Region(q, min(q + block, LENGTH), k, min(k + block, LENGTH)) for q, k in chosen)
    return Mask(tuple(regions), f"sparse:{block}")


MASKS = (sparse(9, 0.2), Mask.documents((0, 31, 48, LENGTH)), Mask.window(5, 3), sparse(4, 0.2, earlier=True))
