"""Where the flags of peer copies lie, among those that each of `size` ranks has for its peers to set.

::

    peer p's message i has come        p·MESSAGES + i
    peer p's inbox is free             size·MESSAGES + p
    peer p's part of exchange e        size·(MESSAGES + 1 + e) + p
"""

from __future__ import annotations

from functools import lru_cache

MESSAGES = 64
"""From one rank to another in one pass, at most."""
EXCHANGES = 32
"""In one pass, at most."""


def flags(size: int) -> int:
    """How many flags each of so many ranks has."""
    return size * (MESSAGES + 1 + EXCHANGES)


def came_flag(peer: int, index: int) -> int:
    """Where a peer says that its message of that index has come."""
    return peer * MESSAGES + index


def free_flag(size: int, peer: int) -> int:
    """Where a peer says that its inbox is free."""
    return size * MESSAGES + peer


def exchange_flag(size: int, index: int, peer: int) -> int:
    """Where a peer says that its part of that exchange has come."""
    return size * (MESSAGES + 1 + index) + peer


@lru_cache(maxsize=1024)
def exchange_flags(size: int, index: int, peers: tuple[int, ...]) -> tuple[int, ...]:
    """The same of several peers."""
    return tuple(exchange_flag(size, index, peer) for peer in peers)


def peer_of(flag: int, size: int) -> int:
    """Who sets it."""
    return flag // MESSAGES if flag < size * MESSAGES else flag % size
