"""Define `Cache`, a dict that does not grow beyond a limit."""

from __future__ import annotations

from typing import TypeVar

K = TypeVar("K")
V = TypeVar("V")


class Cache(dict[K, V]):
    """A dict that is cleared when it has `most` entries. Lookups cost no more than those of a dict."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self._most = most

    def keep(self, key: K, value: V) -> V:
        """Store a value and return it."""
        if len(self) >= self._most:
            self.clear()
        self[key] = value
        return value
