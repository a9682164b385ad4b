"""What other libraries raise, in one line."""

from __future__ import annotations

_LONGEST = 300  # characters


def told(error: Exception) -> str:
    """The kind of an error and its text; a KeyError's text alone is but a key."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:_LONGEST]
