"""Commands whose ranks a launcher such as torchrun may have started: how many there are, and who says what is wrong."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from burst_portable.config import Launched
from burst_portable.errors import BurstError, InputError, explain


def ranks_asked(asked: int | None, place: Launched | None) -> int | None:
    """The ranks that `--ranks` or the launcher says, None if neither. Raises `InputError` if the two disagree."""
    if place is None:
        return asked
    if asked not in (None, place.world_size):
        raise InputError(
            explain("--ranks and the launcher disagree", got=f"--ranks {asked}", allowed=f"{place.world_size}, or none")
        )
    return place.world_size


@contextmanager
def naming_rank(place: Launched | None) -> Iterator[None]:
    """What goes wrong under a launcher names the rank: it may be wrong on one host alone, and every rank says it."""
    try:
        yield
    except BurstError as error:
        if place is None:
            raise
        raise type(error)(f"rank {place.rank}: {error}") from error
