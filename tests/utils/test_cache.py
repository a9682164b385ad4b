"""Test the dict that does not grow beyond a limit."""

from __future__ import annotations

from burst_portable.utils.cache import Cache


def test_cache_is_cleared_when_full():
    cache: Cache[int, str] = Cache(2)
    assert cache.keep(1, "one") == "one"
    cache.keep(2, "two")
    assert cache == {1: "one", 2: "two"}
    cache.keep(3, "three")
    assert cache == {3: "three"}
