"""A strategy from what was typed: `plan` and `run` take the same options."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from typing import Annotated, Any, get_type_hints

import typer

from burst_portable.config import Launched
from burst_portable.errors import BurstError, InputError, format_error, shown
from burst_portable.planning.hardware import HardwareSpec
from burst_portable.strategies.base import Strategy
from burst_portable.strategies.options import Option, options_of
from burst_portable.strategies.registry import classes, has_option, known, load, make_strategy

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


STRATEGY = f"{', '.join(known())}; auto takes the least predicted time."
LAYOUT = (
    "auto (the least predicted time), contiguous, zigzag or striped; whole_documents or document_zigzag where the mask "
    "is of documents."
)


RANKS_PER_NODE = "Ranks a node, if there are several nodes; unless given, auto leaves out the strategies for them."


def flag(option: str) -> str:
    """Return the flag of an option of a strategy."""
    return f"--{option.replace('_', '-')}"


def _those_with(option: str) -> list[str]:
    """Return the names of the strategies that have an option."""
    return [name for name, strategy in classes().items() if any(one.name == option for one in fields(strategy))]


def strategy_flags() -> dict[str, inspect.Parameter]:
    """Return a command's parameter for each option of a strategy that has a flag, by the option's name.

    Strategies that declare an option alike share a sentence of its help. If some take a word and others an integer, the
    flag takes a word, and `asked_strategy` reads the integer.
    """
    declared: dict[str, dict[Option, list[str]]] = {}
    for name, strategy in classes().items():
        for option, how in options_of(strategy):
            if how.flag:
                declared.setdefault(option, {}).setdefault(how, []).append(name)
    return {
        option: inspect.Parameter(
            option,
            inspect.Parameter.KEYWORD_ONLY,
            default=None,
            annotation=Annotated[
                (str if any(how.choices for how in alike) else int) | None, typer.Option(help=_flag_help(alike))
            ],
        )
        for option, alike in declared.items()
    }


def _flag_help(alike: Mapping[Option, list[str]]) -> str:
    return " ".join(f"For {', '.join(names)}: {how.help} Default: {how.default}." for how, names in alike.items())


Command = Callable[..., int]


def with_strategy_flags(command: Command) -> Command:
    """Give a command the flags of all strategies; those that were typed come as its argument `options`, by name."""
    flags = strategy_flags()
    hints = get_type_hints(command, include_extras=True)
    parameters: list[inspect.Parameter] = []
    for name, one in inspect.signature(command).parameters.items():
        parameters += flags.values() if name == "options" else [one.replace(annotation=hints[name])]

    def run(**given: Any) -> int:
        options = {name: value for name in flags if (value := given.pop(name)) is not None}
        return command(**given, options=options)

    run.__name__, run.__doc__ = command.__name__, command.__doc__
    run.__signature__ = inspect.Signature(  # type: ignore[attr-defined]  # typer reads it
        [one.replace(kind=inspect.Parameter.KEYWORD_ONLY) for one in parameters]
    )
    run.__annotations__ = {one.name: one.annotation for one in parameters}
    return run


def asked_strategy(
    name: str, ranks_per_node: int | None, options: Mapping[str, object], hardware: HardwareSpec
) -> Strategy:
    """Return the strategy of that name with what was typed; `hardware` are what auto predicts times with.

    Raises `UnknownNameError`, or `InputError` for an option that the strategy does not have.
    """
    typed = {**options, **({} if ranks_per_node is None else {"ranks_per_node": ranks_per_node})}
    for option, value in typed.items():
        if name in known() and not has_option(name, option):
            raise InputError(
                f"the strategy {name!r} takes no {flag(option)}",
                got=shown(value),
                next_step=f"leave it out, or ask for --strategy {' or '.join(_those_with(option))}",
            )
    if name in known():
        declared = dict(options_of(load(name)))
        typed = {option: _as_declared(value, declared[option]) for option, value in typed.items()}
    return make_strategy(name, **typed, hardware=hardware if name == "auto" else None)


def _as_declared(value: object, declared: Option) -> object:
    """Return a word as an integer if the option takes one; anything else stays, for the option's own check."""
    if declared.choices or not isinstance(value, str):
        return value
    try:
        return int(value)
    except ValueError:
        return value


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
