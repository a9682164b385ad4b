"""Where the flags of peer copies lie. Each of `size` ranks has flags that its peers set.

::

    peer p's message i has come        p·MESSAGES + i
    peer p's inbox is free             size·MESSAGES + p
    peer p's part of exchange e        size·(MESSAGES + 1 + e) + p
"""

from __future__ import annotations

from functools import lru_cache

MESSAGES = 64
"""The most from one rank to another in one pass."""
EXCHANGES = 32
"""The most in one pass."""


def flags(size: int) -> int:
    """How many flags each of `size` ranks has."""
    return size * (MESSAGES + 1 + EXCHANGES)


def came_flag(peer: int, index: int) -> int:
    """The flag by which a peer says that its message of this index has arrived."""
    return peer * MESSAGES + index


def free_flag(size: int, peer: int) -> int:
    """The flag by which a peer says that its inbox is free."""
    return size * MESSAGES + peer


def exchange_flag(size: int, index: int, peer: int) -> int:
    """The flag by which a peer says that its part of this exchange has arrived."""
    return size * (MESSAGES + 1 + index) + peer


@lru_cache(maxsize=1024)
def exchange_flags(size: int, index: int, peers: tuple[int, ...]) -> tuple[int, ...]:
    """The same for several peers."""
    return tuple(exchange_flag(size, index, peer) for peer in peers)


def peer_of(flag: int, size: int) -> int:
    """The peer that sets a flag."""
    return flag // MESSAGES if flag < size * MESSAGES else flag % size
