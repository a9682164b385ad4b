"""Divide the heads of a call among ranks, and those of one rank into groups."""

from __future__ import annotations

from dataclasses import dataclass

from burst_portable.planning.call import AttentionCall

HeadRange = tuple[int, int]
"""[start, stop) among the heads of a rank."""


@dataclass(frozen=True, slots=True)
class HeadGroup:
    """Heads that a rank computes in one launch, while the next group arrives and the previous one is sent back.

    Attributes:
        q_heads: Query heads of the group.
        kv_heads: K/V heads that they read. Several groups may share one K/V head.
        brings_kv: Whether K and V arrive with this group, the first one that reads them.
        returns_kv: Whether dK and dV are sent back after this group, the last one that reads them.
    """

    q_heads: HeadRange
    kv_heads: HeadRange
    brings_kv: bool
    returns_kv: bool


@dataclass(frozen=True, slots=True)
class HeadSplit:
    """The division of heads: sequence shards are exchanged for head shards before a pass, and back after it.

    Attributes:
        ranks: Number of ranks that divide the heads among themselves: all ranks, those of a node, or one per node.
        spacing: Distance from one of these ranks to the next. Above 1, the members of a ring are consecutive ranks, and
            it is their number.
    """

    ranks: int
    spacing: int = 1

    def index(self, rank: int) -> int:
        """Return the index of a rank among those with which it divides heads."""
        return rank // self.spacing % self.ranks

    def peers(self, rank: int) -> range:
        """Return the ranks with which a rank divides heads, including itself, by index."""
        first = rank - self.index(rank) * self.spacing
        return range(first, first + self.ranks * self.spacing, self.spacing)


def heads_of_rank(rank: int, ranks: int, heads: int) -> slice:
    """Return the heads of a rank. If there are fewer heads than ranks, several ranks share a head."""
    if heads >= ranks:
        return slice(rank * heads // ranks, (rank + 1) * heads // ranks)
    owned = rank * heads // ranks
    return slice(owned, owned + 1)


def can_divide_heads(call: AttentionCall, ranks: int) -> bool:
    """Return whether ranks can have equally many query heads each, with complete K/V heads."""
    return call.heads % ranks == 0 and (call.kv_heads % ranks == 0 or ranks % call.kv_heads == 0)


def heads_per_rank(call: AttentionCall, ranks: int) -> tuple[int, int]:
    """Return (query heads, K/V heads) of each rank."""
    assert can_divide_heads(call, ranks), "the strategy has checked"
    return call.heads // ranks, max(1, call.kv_heads // ranks)


def can_group_heads(heads: int, kv_heads: int, groups: int) -> bool:
    """Return whether a rank's heads form this many equal groups. A group has complete K/V heads, or is part of one."""
    if groups < 1 or heads % groups:
        return False
    size, readers = heads // groups, heads // kv_heads
    return size % readers == 0 or readers % size == 0


def split_heads(heads: int, kv_heads: int, groups: int) -> tuple[HeadGroup, ...]:
    """Return the groups of one rank's heads, in the order in which they are computed."""
    assert can_group_heads(heads, kv_heads, groups), "the strategy has checked"
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
