"""Find strategies by name: those of this package, and those that other packages register by entry points.

A package registers its strategies in its ``pyproject.toml``::

    [project.entry-points."burst_portable.strategies"]
    all_gather = "their_strategy.all_gather:AllGatherStrategy"

Such a package is imported only when its strategy is named, or when all strategies are asked for.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from functools import lru_cache
from importlib import import_module
from importlib.metadata import entry_points
from inspect import isabstract

from burst_portable.errors import InputError, UnsupportedError, in_a_line, shown, unknown_name
from burst_portable.planning.call import AttentionCall
from burst_portable.planning.plans import Plan
from burst_portable.strategies.base import Strategy
from burst_portable.strategies.options import RESERVED_FLAGS, options_of

GROUP = "burst_portable.strategies"
_OURS = {
    name: f"burst_portable.strategies.{module}"
    for name, module in {
        "ring": "ring:RingStrategy",
        "burst": "burst:BurstStrategy",
        "double_ring": "double_ring:DoubleRingStrategy",
        "ulysses": "ulysses:UlyssesStrategy",
        "usp": "usp:UspStrategy",
        "auto": "auto:AutoStrategy",
    }.items()
}
OURS = tuple(_OURS)
"""Names of the strategies of this package."""


def known() -> dict[str, str]:
    """Return the name of every strategy, and where it comes from (``module:class``). No package can take our names."""
    return {name: homes[0] for name, homes in _registered().items()}


def load(name: str) -> type[Strategy]:
    """Return the class of a strategy.

    Raises `UnknownNameError` for an unknown name, `UnsupportedError` for another package's strategy that is broken.
    """
    if isinstance(name, str) and name in _OURS:
        return _imported(name, _OURS[name])
    registered = _registered()
    if not isinstance(name, str) or name not in registered:
        raise unknown_name("strategy", name, registered)
    homes = registered[name]
    if len(homes) > 1:
        what = f"packages register the strategy {name!r} at once"
        raise UnsupportedError(what, got=", ".join(sorted(homes)), next_step="uninstall all but one")
    return _imported(name, homes[0])


@lru_cache(maxsize=1)
def classes() -> dict[str, type[Strategy]]:
    """Return the class of every strategy that can be imported, by name; ours first."""
    return {name: found for name, found in _loaded().items() if not isinstance(found, str)}


@lru_cache(maxsize=1)
def broken() -> dict[str, str]:
    """Return why strategies of other packages cannot be used, by name."""
    reasons = {name: found for name, found in _loaded().items() if isinstance(found, str)}
    for name, homes in _registered().items():
        for home in homes[1:] if name in _OURS else ():
            reasons[f"{name} of {home}"] = f"burst_portable has a strategy {name!r} itself; register another name"
    return reasons


@lru_cache(maxsize=1)
def _loaded() -> dict[str, type[Strategy] | str]:
    """Return the class of every strategy, or why it cannot be used. Kept, since `auto` reads it for every plan."""
    found: dict[str, type[Strategy] | str] = {}
    for name in known():
        try:
            found[name] = load(name)
        except UnsupportedError as error:  # it was not named: a reason, and no failure
            found[name] = str(error)
    return found


def make_strategy(name: str, **options: object) -> Strategy:
    """Return the strategy of that name, with its options; options that are None are left at their defaults.

    Raises `UnknownNameError`, or `InputError` for an option that the strategy does not have.
    """
    base, plus, _ = name.partition("+") if isinstance(name, str) else ("", "", "")
    if plus and base in _OURS:  # as plans are called if their options differ
        raise InputError(
            "a strategy's options are not part of its name",
            got=shown(name),
            next_step=f'make_strategy("{base}", transfer="direct", ...), or --strategy {base} --transfer direct',
        )
    cls = load(name)
    given = {key: value for key, value in options.items() if value is not None}
    allowed = {one.name for one in fields(cls)}
    if extra := sorted(set(given) - allowed):
        raise InputError(
            f"the strategy {name!r} has no option {extra[0]!r}", allowed=", ".join(sorted(allowed)) or "none"
        )
    return cls(**given)


@contextmanager
def leaving_out(name: str, label: str, refused: dict[str, str]) -> Iterator[None]:
    """Keep the reason in `refused`, by label, if a strategy that is compared with others cannot serve.

    An `InputError` or `UnsupportedError` is a refusal. Any other error is a mistake: one of another package's strategy
    is kept as well, so that the others still serve; one of ours is raised.
    """
    try:
        yield
    except (InputError, UnsupportedError) as error:
        refused[label] = str(error)
    except Exception as error:
        if name in _OURS:
            raise
        refused[label] = f"it is broken: {in_a_line(error)}"


def has_option(name: str, option: str) -> bool:
    """Return whether the strategy of that name has such an option."""
    return any(one.name == option for one in fields(load(name)))


def strategy_of(strategy: Strategy | str, ranks_per_node: int | None = None) -> Strategy:
    """Return the strategy that a user passed. It is part of the key of plans, so it must be hashable.

    inner: Ranks per node, for a strategy with nodes that is passed by name. Default: the strategy's own.
    """
    if isinstance(strategy, str):
        with_nodes = ranks_per_node is not None and strategy in known() and has_option(strategy, "ranks_per_node")
        return make_strategy(strategy, ranks_per_node=ranks_per_node if with_nodes else None)
    if not isinstance(strategy, Strategy):
        raise unknown_name("strategy", strategy, known())
    try:
        hash(strategy)
    except TypeError:
        name = type(strategy).__name__
        raise InputError(
            f"the strategy {name} cannot be hashed", next_step="make it frozen, with options that can be"
        ) from None
    return strategy


def _registered() -> dict[str, list[str]]:
    """Return every name, and everything that is registered under it; ours first."""
    homes = {name: [home] for name, home in _OURS.items()}
    for point in entry_points(group=GROUP):
        found = homes.setdefault(point.name, [])
        if point.value not in found:
            found.append(point.value)
    return homes


def _imported(name: str, home: str) -> type[Strategy]:
    """Import a strategy. Raise `UnsupportedError`, with the reason, if another package's is broken."""
    module, _, attribute = home.partition(":")
    what = f"the strategy {name!r} (from {home})"
    try:
        found: type[Strategy] = getattr(import_module(module), attribute)
    # A package's module may do anything on import.
    except (Exception, SystemExit) as error:
        next_step = f"`python -c 'import {module}'` shows where; reinstall that package, or remove it"
        raise UnsupportedError(
            f"{what} is broken: it fails to import", got=in_a_line(error), next_step=next_step
        ) from error
    if reason := _misshapen(found, name):
        raise UnsupportedError(f"{what} is not a strategy: {reason}", next_step="see docs/writing_a_strategy.md")
    return found


def _misshapen(found: object, name: str) -> str:
    """Return what is wrong with something that is registered as a strategy; "" for a proper one."""
    if not isinstance(found, type) or not issubclass(found, Strategy):
        return f"{shown(found)} is no subclass of burst_portable.strategies.base.Strategy"
    if "__dataclass_fields__" not in vars(found):
        return f"{found.__name__} is no dataclass; decorate it with @dataclass(frozen=True)"
    if isabstract(found):
        return f"{found.__name__} lacks {', '.join(sorted(found.__abstractmethods__))}"
    if absent := [part for part in ("name", "title") if not isinstance(vars(found).get(part), str)]:
        return f"{found.__name__} has no {' and no '.join(absent)}"
    if found.name != name:
        return f"it calls itself {found.name!r}; the name that is registered must be its own"
    return "" if name in _OURS else _wrong_options(found) or _wrong_trials(found)


def _wrong_options(strategy: type[Strategy]) -> str:
    """Return what is wrong with the fields of another package's strategy; "" if nothing is."""
    options = dict(options_of(strategy))
    if plain := [one.name for one in fields(strategy) if one.name not in options]:
        return (
            f"its field {plain[0]!r} is no option; declare it with `option(...)` of burst_portable.strategies.options"
        )
    if taken := [name for name, how in options.items() if how.flag and name in RESERVED_FLAGS]:
        return f"its option {taken[0]!r} would be a flag that the commands have already; rename it, or pass flag=False"
    return ""


def _wrong_trials(strategy: type[Strategy]) -> str:
    """Return what is wrong with the trials of another package's strategy; "" if nothing is."""
    refused: dict[str, str] = {}
    trials: Mapping[str, Strategy] = {}
    with leaving_out("", "trials", refused):
        trials = by_label(strategy, strategy.trials().items(), "trial")
    if refused:
        return f"its trials: {refused['trials']}"
    if absent := [label for label in strategy.suggested if label not in trials]:
        return f"it suggests {absent[0]!r}, which is none of its trials: {', '.join(trials)}"
    return ""


# ---------------------------------------------------------------------------- what strategies return


def checked_plan(strategy: Strategy, call: AttentionCall) -> Plan:
    """Return the strategy's plan for a call.

    Raises as `Strategy.plan`, and `UnsupportedError` for what is no plan, or a plan that has another strategy's name.
    """
    plan = strategy.plan(call)
    what = f"the strategy {strategy.name!r} is broken"
    if not isinstance(plan, Plan):
        raise UnsupportedError(f"{what}: its `plan` returned no Plan", got=shown(plan))
    if plan.strategy != strategy.name and strategy.name != "auto":
        raise UnsupportedError(
            f"{what}: its plan has another name", got=shown(plan.strategy), next_step="pass `self.name` to the plan"
        )
    return plan


def by_label(strategy: type[Strategy], found: Iterable[tuple[str, Strategy]], what: str) -> dict[str, Strategy]:
    """Return what a strategy's `candidates` or `trials` name, by label.

    Raises `UnsupportedError` for a label that may be another strategy's, and for what is no strategy. `what`: a
    "candidate" or a "trial".
    """
    named = {}
    for label, one in found:
        name = strategy.name
        own = isinstance(label, str) and (label == name or label.startswith((f"{name}+", f"{name},", f"{name} ")))
        if not own:
            raise UnsupportedError(
                f"a {what} of the strategy {name!r} has a label that is not its own",
                got=shown(label),
                allowed=f"{name!r}, or {name!r} with '+', ',' or ' ' and words after it",
            )
        if not isinstance(one, Strategy):
            raise UnsupportedError(f"the {what} {label!r} is no Strategy", got=shown(one))
        named[label] = one
    return named
