"""Give commands a flag for each option of a strategy, and make the strategy that a command line names."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Annotated, Any, get_type_hints

import typer

from burst_portable.cli.flags import integer_option
from burst_portable.errors import InputError, shown
from burst_portable.planning.hardware import HardwareSpec
from burst_portable.strategies.base import Strategy
from burst_portable.strategies.options import Option, options_of
from burst_portable.strategies.registry import classes, has_option, known, load, make_strategy, strategy_name
from burst_portable.utils.values import parse_int


def flag(option: str) -> str:
    """Return the flag of a strategy's option."""
    return f"--{option.replace('_', '-')}"


def strategy_flags() -> dict[str, inspect.Parameter]:
    """Return a command's parameter for each option of a strategy that has a flag, by the option's name.

    If some strategies take a word and others an integer, the flag takes a word, and `make_named_strategy` converts it.
    """
    declared: dict[str, dict[str, Option]] = {}
    for name, strategy in classes().items():
        for option, declaration in options_of(strategy):
            if declaration.flag:
                declared.setdefault(option, {})[name] = declaration
    return {
        option: inspect.Parameter(
            option,
            inspect.Parameter.KEYWORD_ONLY,
            default=None,
            annotation=(
                Annotated[str | None, typer.Option(help=_flag_help(by_strategy))]
                if any(one.choices for one in by_strategy.values())
                else Annotated[int | None, integer_option(help=_flag_help(by_strategy))]
            ),
        )
        for option, by_strategy in declared.items()
    }


def _flag_help(declared: Mapping[str, Option]) -> str:
    """Join the help of an option, by strategy. Strategies that declare it alike share a sentence."""
    sentences: dict[str, dict[str, object]] = {}
    for name, declaration in declared.items():
        sentences.setdefault(declaration.help, {})[name] = declaration.default
    return " ".join(f"For {', '.join(of)}: {text} Default: {_default(of)}." for text, of in sentences.items())


def _default(defaults: Mapping[str, object]) -> str:
    """Return the default of an option, by strategy if they differ."""
    if len(values := {*defaults.values()}) == 1:
        return str(values.pop())
    return ", ".join(f"{value} ({name})" for name, value in defaults.items())


Command = Callable[..., int]


def with_strategy_flags(command: Command) -> Command:
    """Give a command the flags of all strategies. It gets the values that were set as `options`, by name."""
    flags = strategy_flags()
    hints = get_type_hints(command, include_extras=True)
    parameters: list[inspect.Parameter] = []
    for name, one in inspect.signature(command).parameters.items():
        parameters += flags.values() if name == "options" else [one.replace(annotation=hints[name])]

    def run(**values: Any) -> int:
        options = {name: value for name in flags if (value := values.pop(name)) is not None}
        return command(**values, options=options)

    run.__name__, run.__doc__ = command.__name__, command.__doc__
    run.__signature__ = inspect.Signature(  # type: ignore[attr-defined]  # typer reads it
        [one.replace(kind=inspect.Parameter.KEYWORD_ONLY) for one in parameters]
    )
    run.__annotations__ = {one.name: one.annotation for one in parameters}
    return run


def make_named_strategy(
    name: str, ranks_per_node: int | None, options: Mapping[str, object], hardware: HardwareSpec
) -> Strategy:
    """Return the strategy of a command line.

    Args:
        name: Name or label of the strategy.
        ranks_per_node: Value of that flag, or None.
        options: Values of the flags of strategies, by option.
        hardware: Speeds with which `auto` predicts times.

    Raises:
        UnknownNameError: If there is no strategy of this name.
        InputError: If the strategy does not have one of the options.
    """
    values = {**options, **({} if ranks_per_node is None else {"ranks_per_node": ranks_per_node})}
    base = strategy_name(name)
    for option, value in values.items():
        if base in known() and not has_option(base, option):
            having = " or ".join(one for one in classes() if has_option(one, option))
            next_step = f"omit it, or use --strategy {having}"
            raise InputError(f"the strategy {base!r} has no {flag(option)}", got=shown(value), next_step=next_step)
    if base in known():
        declared = dict(options_of(load(base)))
        values = {option: _convert(value, declared[option]) for option, value in values.items()}
    return make_strategy(name, **values, hardware=hardware if base == "auto" else None)


def _convert(value: object, declared: Option) -> object:
    """Convert a word to an integer if the option takes one. The option's own check reports other words."""
    if declared.choices or not isinstance(value, str):
        return value
    number = parse_int(value)
    return value if number is None else number
