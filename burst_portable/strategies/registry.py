"""Strategies by name."""

from __future__ import annotations

from dataclasses import fields
from importlib import import_module

from burst_portable.errors import InputError, explain, shown, unknown_name
from burst_portable.strategies.base import Strategy

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
                explain(
                    "a strategy's options are not part of its name",
                    got=shown(name),
                    next_step=f'make_strategy("{base}", moves="fetch", ...), or --strategy {base} --moves fetch',
                )
            )
        raise unknown_name("strategy", name, _CLASSES)
    cls = getattr(import_module(f"burst_portable.strategies.{name}"), _CLASSES[name])
    given = {key: value for key, value in options.items() if value is not None}
    allowed = {field.name for field in fields(cls)} - {"name"}
    if extra := sorted(set(given) - allowed):
        raise InputError(
            explain(
                f"the strategy {name!r} has no option {extra[0]!r}",
                allowed=", ".join(sorted(allowed)) or "none",
            )
        )
    strategy: Strategy = cls(**given)
    return strategy
