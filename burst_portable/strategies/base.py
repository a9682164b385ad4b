"""What a strategy is: a generator of plans."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields
from importlib import import_module
from typing import Literal, Protocol

from burst_portable.errors import InputError, shown, unknown_name
from burst_portable.planning.call import AttentionCall
from burst_portable.planning.messages import row_size
from burst_portable.planning.plans import Plan, make_pass_plan
from burst_portable.planning.routes import Fetch, Own, Ring, Route, Side
from burst_portable.utils.values import divisors

Moves = Literal["neighbour", "fetch"]
"""How blocks travel: from neighbour to neighbour, or straight from their owners."""
GradientWidth = Literal["wide", "narrow"]
"""How gradients travel: as they are added up (wide: float32 for 16-bit inputs), or rounded to the inputs' dtype."""


class Strategy(Protocol):
    """One way to distribute an attention. Frozen, hashable; `plan` is pure."""

    @property
    def name(self) -> str:
        """File name, registry key, command-line value, test id and trace label."""

    def __hash__(self) -> int:
        """Plans are looked up by their strategy."""

    def plan(self, call: AttentionCall) -> Plan:
        """The plan for a call.

        Raises `UnsupportedError` or `InputError` where strategy and call do not go together.
        """


def check_name(kind: str, name: object, known: Sequence[str]) -> None:
    """Refuse a name that is not in `known`."""
    if not isinstance(name, str) or name not in known:
        raise unknown_name(kind, name, known)


def check_moves(moves: object) -> None:
    """Refuse what is not one of `Moves`."""
    check_name("way of moving", moves, ("neighbour", "fetch"))


def check_inner(inner: object) -> None:
    """Refuse what is not a number of ranks per node. 2.0 and True are refused too: as keys they equal 2 and 1."""
    if inner is not None and (type(inner) is not int or inner < 1):
        raise InputError("inner is not a size", got=shown(inner), allowed="an int of at least 1, or None")


def node_size(ranks: int, fits: Callable[[int], bool] = lambda inner: True) -> int:
    """Ranks a node where nobody says: the largest divisor that fits, is at most 8, and leaves several nodes."""
    return max((i for i in divisors(ranks) if i <= min(ranks // 2, 8) and fits(i)), default=1)


def check_fetched(moves: Moves, ahead: object, together: object) -> None:
    """Refuse an `ahead` that is not a number of steps, and a `together` that is not a number of fetched blocks."""
    for name, what, given in (("ahead", "steps", ahead), ("together", "blocks", together)):
        if type(given) is not int or given < 1:
            raise InputError(f"{name} is not a number of {what}", got=shown(given), allowed="an int of at least 1")
    if together != 1 and moves != "fetch":
        raise InputError(
            "blocks from a neighbour come one by one", got=f"together={together}", next_step='moves="fetch"'
        )


def check_own(moves: Moves, own: object) -> None:
    """Refuse an `own` that does not say when the own block is computed with."""
    check_name("place of the own block", own, ("first", "last", "divided"))
    if own != "first" and moves != "fetch":
        raise InputError(
            "a block that is handed on begins with its owner", got=f"own={own!r}", next_step='moves="fetch"'
        )


def check_gradients(gradients: object) -> None:
    """Refuse what is not one of `GradientWidth`."""
    check_name("way for gradients to travel", gradients, ("wide", "narrow"))


def travel_narrow(call: AttentionCall, gradients: GradientWidth) -> bool:
    """Whether gradients travel in fewer bytes than they are summed in. Those of float32 and float64 inputs never do."""
    return gradients == "narrow" and call.itemsize < 4


def share_before(call: AttentionCall, own: Own, side: Side, *, narrow: bool) -> float:
    """How much of its own block a rank computes before all others: divided, by the bytes that each part is to hide."""
    if own != "divided":
        return float(own == "first")
    block, gradients = (row_size(call, side, result=result, narrow=narrow) for result in (False, True))
    return block / (block + gradients)


def route(ranks: int, moves: Moves, ahead: int = 1, together: int = 1, before: float = 1.0) -> Route:
    """The route for a way of moving. `ahead`, `together` and `before` are for fetched blocks: see `routes.Fetch`."""
    if moves == "fetch":
        others = max(1, ranks - 1)
        together = min(together, others)
        return Fetch(ranks, min(ahead, -(-others // together)), together, before)
    return Ring(ranks)


def ring_plan(
    call: AttentionCall, strategy: str, *, side: Side, path: Route, back: Route | None = None, note: str = "",
    stride: int = 1, narrow: bool = False,
) -> Plan:  # fmt: skip
    """The plan of the whole ring family: K and V travel forward, `side` and its gradients travel backward.

    Args:
        path: the route of the forward pass.
        back: the route of the backward pass; `path` unless given.
        note: the plan's `reason`.
        stride, narrow: see `PassPlan`.
    """
    back = back or path
    return Plan(
        call,
        strategy,
        forward=make_pass_plan(call, "kv", path, stride=stride),
        backward=make_pass_plan(call, side, back, results=back, stride=stride, narrow=narrow),
        reason=note,
    )


_CLASSES = {
    "ring": "RingStrategy",
    "burst": "BurstStrategy",
    "double_ring": "DoubleRingStrategy",
    "ulysses": "UlyssesStrategy",
    "usp": "UspStrategy",
    "auto": "AutoStrategy",
}

NAMES = tuple(_CLASSES)
WITH_NODES = ("double_ring", "usp", "auto")
"""Those that have an option `inner`: ranks per node."""


def make_strategy(name: str, **options: object) -> Strategy:
    """The strategy of that name, with its options; options that are None are left at their defaults.

    Raises `UnknownNameError`, or `InputError` for an option that the strategy does not have.
    """
    if not isinstance(name, str) or name not in _CLASSES:
        base = name.partition("+")[0] if isinstance(name, str) else ""
        if base in _CLASSES:  # as plans are called where their options differ
            raise InputError(
                "a strategy's options are not part of its name",
                got=shown(name),
                next_step=f'make_strategy("{base}", moves="fetch", ...), or --strategy {base} --moves fetch',
            )
        raise unknown_name("strategy", name, _CLASSES)
    cls = getattr(import_module(f"burst_portable.strategies.{name}"), _CLASSES[name])
    given = {key: value for key, value in options.items() if value is not None}
    allowed = {field.name for field in fields(cls)} - {"name"}
    if extra := sorted(set(given) - allowed):
        raise InputError(
            f"the strategy {name!r} has no option {extra[0]!r}",
            allowed=", ".join(sorted(allowed)) or "none",
        )
    strategy: Strategy = cls(**given)
    return strategy
