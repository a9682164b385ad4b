"""How heads are divided among ranks where attention is resharded, and the groups in which a rank computes its own.

::

    8 query heads, 2 K/V heads, 2 ranks, 2 groups       rank 0    q0 q1 | q2 q3    both read k0
                                                        rank 1    q4 q5 | q6 q7    both read k1
"""

from __future__ import annotations

from dataclasses import dataclass

Span = tuple[int, int]
"""[first, past) among the heads that a rank holds."""


@dataclass(frozen=True, slots=True)
class HeadGroup:
    """What a rank computes in one launch.

    Attributes:
        queries, keys: its query heads, and the K/V heads that they read.
        first, last: whether this is the first, or the last, group that reads these K/V heads: K and V arrive with the
            first, dK and dV leave after the last.
    """

    queries: Span
    keys: Span
    first: bool
    last: bool


def heads_of(rank: int, ranks: int, heads: int) -> slice:
    """The heads that a rank holds; if there are fewer heads than ranks, ranks share a head."""
    if heads >= ranks:
        return slice(rank * heads // ranks, (rank + 1) * heads // ranks)
    owned = rank * heads // ranks
    return slice(owned, owned + 1)


def can_share(heads: int, kv_heads: int, ranks: int) -> bool:
    """Whether this many ranks can have equally many heads each, with whole K/V heads."""
    return heads % ranks == 0 and (kv_heads % ranks == 0 or ranks % kv_heads == 0)


def heads_each(heads: int, kv_heads: int, ranks: int) -> tuple[int, int]:
    """(query heads, K/V heads) that each rank has."""
    assert can_share(heads, kv_heads, ranks), "the strategy has checked"
    return heads // ranks, max(1, kv_heads // ranks)


def can_group(heads: int, kv_heads: int, groups: int) -> bool:
    """Whether a rank's heads form this many equal groups, each of whole K/V heads or within one."""
    if groups < 1 or heads % groups:
        return False
    size, readers = heads // groups, heads // kv_heads
    return size % readers == 0 or readers % size == 0


def head_groups(heads: int, kv_heads: int, groups: int) -> tuple[HeadGroup, ...]:
    """The groups of one rank's heads, in the order in which they are computed."""
    assert can_group(heads, kv_heads, groups), "the strategy has checked"
    size, readers = heads // groups, heads // kv_heads
    return tuple(
        HeadGroup(
            (start, start + size),
            (start // readers, (start + size - 1) // readers + 1),
            start % readers == 0,
            (start + size) % readers == 0,
        )
        for start in range(0, heads, size)
    )
