"""A strategy from what was typed: `plan` and `run` take the same options."""

from __future__ import annotations

from burst_portable.errors import InputError, explain, shown
from burst_portable.rates import Rates
from burst_portable.strategies.base import Strategy
from burst_portable.strategies.registry import NAMES, WITH_NODES, make_strategy

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
                explain(
                    f"the strategy {name!r} takes no {option}",
                    got=shown(typed[option]),
                    next_step=f"leave it out, or ask for --strategy {' or '.join(served)}",
                )
            )
    return make_strategy(name, inner=inner, travels=travels, moves=moves, rates=rates if name == "auto" else None)
