"""A strategy from what was typed: `plan` and `run` take the same options."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import typer

from burst_portable.config import Launched
from burst_portable.errors import BurstError, InputError, format_error, shown
from burst_portable.planning.rates import Rates
from burst_portable.strategies.base import NAMES, WITH_NODES, Strategy, make_strategy

LENGTH = "128k and 1m are 131072 and 1048576."
"""For the help of an option whose value `tokens` reads."""

METAVAR = "TOKENS"
_TIMES = {"k": 1 << 10, "K": 1 << 10, "m": 1 << 20, "M": 1 << 20}


def tokens(typed: str | int) -> int:
    """The `parser` of an option: an integer, or digits with k (times 1,024) or m (times 1,048,576) after them.

    Integers may be out of range: what takes them says what they may be. typer hands the option's default through here.
    Raises `typer.BadParameter`, which typer tells with the option's name; of an `InputError` it would keep no word.
    """
    text = str(typed).strip()
    digits, times = text[:-1], _TIMES.get(text[-1:])
    try:
        return int(digits) * times if times and digits.isascii() and digits.isdigit() else int(text)
    except ValueError:  # also for thousands of digits
        allowed = "an integer, or digits with k (times 1,024) or m (times 1,048,576) after them, as 128k"
        raise typer.BadParameter(format_error("not a number of tokens", got=shown(typed), allowed=allowed)) from None


STRATEGY = "auto (the least predicted time), ring, burst, double_ring, ulysses or usp."
LAYOUT = (
    "auto (the least predicted time), contiguous, zigzag or striped; whole_documents or document_zigzag where the mask "
    "is of documents."
)
MOVES = (
    "For ring and burst, and for usp between nodes: neighbour (from rank to rank) or fetch (straight from the owner); "
    "neighbour unless given."
)
TRAVELS = "For double_ring and usp: kv or q, what goes round in the backward pass; q unless given, and kv of usp."
INNER = "Ranks a node, for double_ring, usp and auto; unless given, auto leaves these two out."
_SERVED = {"--inner": WITH_NODES, "--travels": ("double_ring", "usp"), "--moves": ("ring", "burst", "usp")}


def asked_strategy(name: str, inner: int | None, travels: str | None, moves: str | None, rates: Rates) -> Strategy:
    """The strategy of that name with what was given; `rates` are what auto predicts times with.

    Raises `UnknownNameError`, or `InputError` for an option that the strategy does not have.
    """
    typed = {"--inner": inner, "--travels": travels, "--moves": moves}
    for option, served in _SERVED.items():
        if typed[option] is not None and name in NAMES and name not in served:
            raise InputError(
                f"the strategy {name!r} takes no {option}",
                got=shown(typed[option]),
                next_step=f"leave it out, or ask for --strategy {' or '.join(served)}",
            )
    return make_strategy(name, inner=inner, travels=travels, moves=moves, rates=rates if name == "auto" else None)


def ranks_asked(asked: int | None, place: Launched | None) -> int | None:
    """The ranks that `--ranks` or the launcher says, None if neither. Raises `InputError` if the two disagree."""
    if place is None:
        return asked
    if asked not in (None, place.world_size):
        raise InputError(
            "--ranks and the launcher disagree", got=f"--ranks {asked}", allowed=f"{place.world_size}, or none"
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
