"""Find strategies by name: those of this package, and those that other packages register as entry points.

A package registers its strategies in its ``pyproject.toml``::

    [project.entry-points."burst_portable.strategies"]
    broadcast = "their_strategy.broadcast:BroadcastStrategy"

Such a package is imported only when its strategy is named, or when all strategies are compared or listed.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from functools import cached_property, lru_cache
from importlib import import_module
from inspect import isabstract

from burst_portable.errors import (
    BurstError,
    InputError,
    StrategyError,
    UnsupportedError,
    in_a_line,
    shown,
    unknown_name,
)
from burst_portable.strategies.base import Strategy
from burst_portable.strategies.options import RESERVED_FLAGS, Option, options_of
from burst_portable.utils.entry_points import registered_targets

GROUP = "burst_portable.strategies"
_PAGE = "docs/strategies.md"
_OURS = {
    "ring": "burst_portable.strategies.ring:RingStrategy",
    "burst": "burst_portable.strategies.burst:BurstStrategy",
    "double_ring": "burst_portable.strategies.double_ring:DoubleRingStrategy",
    "all_gather": "burst_portable.strategies.all_gather:AllGatherStrategy",
    "ulysses": "burst_portable.strategies.ulysses:UlyssesStrategy",
    "usp": "burst_portable.strategies.usp:UspStrategy",
    "distflash": "burst_portable.strategies.distflash:DistFlashStrategy",
    "dispatch": "burst_portable.strategies.dispatch:DispatchStrategy",
    "ring_self_attention": "burst_portable.strategies.ring_self_attention:RingSelfAttentionStrategy",
    "auto": "burst_portable.strategies.auto:AutoStrategy",
}
OURS = tuple(_OURS)
"""Names of the strategies of this package."""


def known() -> dict[str, str]:
    """Return the name and the origin (``module:class``) of every strategy. No package can replace a built-in one."""
    return {name: origins[0] for name, origins in registered_targets(GROUP, _OURS).items()}


def load(name: str) -> type[Strategy]:
    """Return the class of a strategy.

    Raises:
        UnknownNameError: No strategy has this name.
        StrategyError: The strategy of another package is broken.
        UnsupportedError: Several packages register the name.
    """
    if isinstance(name, str) and name in _OURS:
        return _imported(name, _OURS[name])
    registered = registered_targets(GROUP, _OURS)
    if not isinstance(name, str) or name not in registered:
        section = "#tensor-parallelism" if isinstance(name, str) and name == "tensor_parallel" else ""
        raise unknown_name("strategy", name, registered, _PAGE + section)
    origins = registered[name]
    if len(origins) > 1:
        what = f"several packages register the strategy {name!r}"
        raise UnsupportedError(what, got=", ".join(sorted(origins)), next_step="uninstall all but one")
    return _imported(name, origins[0])


def classes() -> dict[str, type[Strategy]]:
    """Return the class of every strategy that can be imported, by name; built-in ones first."""
    return _loaded()[0]


def broken() -> dict[str, str]:
    """Return why strategies of other packages cannot be used, by name."""
    return _loaded()[1]


@lru_cache(maxsize=1)
def _loaded() -> tuple[dict[str, type[Strategy]], dict[str, str]]:
    """Return the results of `classes` and `broken`. Cached: `auto` reads them for every plan."""
    found: dict[str, type[Strategy]] = {}
    reasons: dict[str, str] = {}
    for name, (_, *others) in registered_targets(GROUP, _OURS).items():
        try:
            found[name] = load(name)
        except (StrategyError, UnsupportedError) as error:  # the caller did not name it, so it is only left out
            reasons[name] = str(error)
        for origin in others if name in _OURS else ():
            reasons[f"{name} of {origin}"] = f"burst_portable has a built-in strategy {name!r}; register another name"
    return found, reasons


def make_strategy(name: str, /, **options: object) -> Strategy:
    """Return the strategy of a name with these options. An option that is None has its default.

    Args:
        name: Name of a strategy, or the label of one, such as ``ring(transfer=direct, prefetch_steps=8)``. Its options
            are set as if they were in `options`.
        options: Options of the strategy.

    Raises:
        UnknownNameError: No strategy has this name.
        InputError: The text is no label, the strategy has no such option, or the option cannot have this value.
    """
    base, written = _parsed(name) if isinstance(name, str) else (name, {})
    cls = load(base)
    declared = dict(options_of(cls))
    given = {key: value for key, value in options.items() if value is not None}
    for key, text in written.items():
        value = _value(text, declared.get(key))
        if key in given and given[key] != value:
            raise InputError(f"{key} is given twice", got=f"{value} in {name!r}, and {shown(given[key])}")
        given[key] = value
    name, allowed = base, {one.name for one in fields(cls)}
    if extra := sorted(set(given) - allowed):
        raise InputError(
            f"the strategy {name!r} has no option {extra[0]!r}", allowed=", ".join(sorted(allowed)) or "none"
        )
    return cls(**given)


def strategy_name(label: str) -> str:
    """Return the name in a label: "ring(transfer=direct)" -> "ring"."""
    return label.partition("(")[0]


@lru_cache(maxsize=256)
def _parsed(label: str) -> tuple[str, Mapping[str, str]]:
    """Return the name and the options of a label. A text without parentheses is a name.

    Raises:
        InputError: The text begins with the name of a strategy, but is no label.
    """
    found = re.fullmatch(r"(\w+)\((.+)\)", label, re.DOTALL)  # tables wrap long labels
    pairs = [part.partition("=") for part in found[2].split(",")] if found else []
    options = {key.strip(): value.strip() for key, _, value in pairs}
    if found and len(options) == len(pairs) and all("" not in (key, *values) for key, *values in pairs):
        return found[1], options
    name = re.split(r"\W", label, maxsplit=1)[0]
    if name != label and name in known():
        raise InputError(
            "the options of a strategy are malformed", got=shown(label), allowed=f"{name}(OPTION=VALUE, OPTION=VALUE)"
        )
    return label, {}


def _value(text: str, declared: Option | None) -> object:
    """Return the value of an option in a label. The option's own check reports a wrong one."""
    if declared is None or declared.choices:
        return text
    if text == "None":
        return None
    return int(text) if re.fullmatch(r"-?[0-9]{1,18}", text) else text


@contextmanager
def collect_reason(name: str, label: str, reasons: dict[str, str]) -> Iterator[None]:
    """Suppress an error of a strategy that is compared with others, and store its text in `reasons` under `label`.

    `InputError` and `UnsupportedError` mean that the strategy cannot serve the call. Any other error is a bug: that of
    another package's strategy is stored as well, so that others still serve; that of a built-in one is raised.
    """
    try:
        yield
    except (InputError, UnsupportedError) as error:
        reasons[label] = str(error)
    except (Exception, SystemExit) as error:
        if name in _OURS:
            raise
        reasons[label] = str(error) if isinstance(error, StrategyError) else f"it is broken: {in_a_line(error)}"


@contextmanager
def named_if_broken(strategy: Strategy) -> Iterator[None]:
    """Raise `StrategyError` with a strategy's package if it raises an unexpected error: see `collect_reason`."""
    try:
        yield
    except BurstError:
        raise
    except (Exception, SystemExit) as error:
        if strategy.name in _OURS:
            raise
        kind = type(strategy)
        raise StrategyError(
            f"the strategy {strategy.name!r} (from {kind.__module__}:{kind.__qualname__}) is broken",
            got=in_a_line(error),
            next_step=f"`burst-portable conform --strategy {strategy.name}` shows where; or name another strategy",
        ) from error


def has_option(label: str, option: str) -> bool:
    """Return whether the strategy of this name or label has this option."""
    return any(one.name == option for one in fields(load(strategy_name(label))))


def strategy_of(strategy: Strategy | str, ranks_per_node: int | None = None) -> Strategy:
    """Return the strategy that a caller passed as a name, a label or an object.

    Args:
        strategy: A name, a label, or an instance. It must be hashable, because plans are cached by it.
        ranks_per_node: Value of that option for a strategy that is passed by name or by a label without it. Default:
            the strategy's default.
    """
    if isinstance(strategy, str):
        unset = ranks_per_node is not None and "ranks_per_node" not in _parsed(strategy)[1]
        applies = unset and strategy_name(strategy) in known() and has_option(strategy, "ranks_per_node")
        return make_strategy(strategy, ranks_per_node=ranks_per_node if applies else None)
    if not isinstance(strategy, Strategy):
        raise unknown_name("strategy", strategy, known(), _PAGE)
    try:
        hash(strategy)
    except TypeError:
        name = type(strategy).__name__
        raise InputError(
            f"the strategy {name} cannot be hashed", next_step="make it a frozen dataclass with hashable options"
        ) from None
    if ignored := _ignored_attributes(strategy):
        raise InputError(
            f"strategies {type(strategy).__name__} are equal even if an attribute differs, so they would share plans",
            got=ignored[0],
            next_step="declare it as a field, and decorate the class with @dataclass(frozen=True)",
        )
    return strategy


def _ignored_attributes(strategy: Strategy) -> list[str]:
    """Return the attributes of a strategy that its `__eq__` ignores. Plans are cached by strategies.

    A class without a decorator inherits the comparison of its base, which has no or fewer fields.
    """
    kind = type(strategy)
    compares = next(base for base in kind.__mro__ if "__eq__" in vars(base))
    if compares is kind or "__dataclass_fields__" not in vars(compares):  # the author of the class wrote it
        return []
    compared = {one.name for one in fields(compares)}
    attributes = [name for name in getattr(strategy, "__dict__", ()) if name not in compared]
    return [name for name in attributes if not isinstance(getattr(kind, name, None), cached_property)]


def _imported(name: str, origin: str) -> type[Strategy]:
    """Import a strategy. Raise `StrategyError` with the reason if it is broken."""
    module, _, attribute = origin.partition(":")
    what = f"the strategy {name!r} (from {origin})"
    try:
        found: type[Strategy] = getattr(import_module(module), attribute)
    # A package's module may do anything on import.
    except (Exception, SystemExit) as error:
        next_step = f"`python -c 'import {module}'` shows where; reinstall that package, or remove it"
        raise StrategyError(
            f"{what} is broken: it fails to import", got=in_a_line(error), next_step=next_step
        ) from error
    if reason := _misshapen(found, name):
        raise StrategyError(f"{what} is broken: {reason}", next_step="see docs/writing_a_strategy.md")
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
        return f"its name is {found.name!r}; register it under that name"
    return "" if name in _OURS else _wrong_options(found) or _wrong_trials(found)


def _wrong_options(strategy: type[Strategy]) -> str:
    """Return an error in the fields of another package's strategy; "" if there is none."""
    options = dict(options_of(strategy))
    if plain := [one.name for one in fields(strategy) if one.name not in options]:
        return (
            f"its field {plain[0]!r} is no option; declare it with `option(...)` of burst_portable.strategies.options"
        )
    if taken := [name for name, how in options.items() if how.flag and name in RESERVED_FLAGS]:
        return f"its option {taken[0]!r} has the name of a flag of the commands; rename it, or pass flag=False"
    return ""


def _wrong_trials(strategy: type[Strategy]) -> str:
    """Return an error in the trials of another package's strategy; "" if there is none."""
    refused: dict[str, str] = {}
    trials: Mapping[str, Strategy] = {}
    with collect_reason("", "trials", refused):
        trials = by_label(strategy, strategy.trials(), "trial")
    if refused:
        return f"its trials: {refused['trials']}"
    if absent := [label for label in strategy.suggested if label not in trials]:
        return f"it suggests {absent[0]!r}, which is not one of its trials: {', '.join(trials)}"
    return ""


def by_label(strategy: type[Strategy], found: Iterable[Strategy], what: str) -> dict[str, Strategy]:
    """Return the `candidates` or `trials` of a strategy by label. `what` names them in error messages.

    Raises:
        StrategyError: One of them is not of this strategy.
    """
    labeled = {}
    for one in found:
        if not isinstance(one, strategy):
            what = f"a {what} of the strategy {strategy.name!r} is not of its class"
            raise StrategyError(what, got=shown(one), allowed=f"instances of {strategy.__name__}")
        labeled[one.label] = one
    return labeled
