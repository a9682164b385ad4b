"""Define the options that several commands share: lengths, strategies and their options, ranks."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias, get_type_hints

import typer

from burst_portable.backends.selection import known as known_backends
from burst_portable.backends.selection import load as load_backend
from burst_portable.backends.selection import probed
from burst_portable.cli import PROGRAM
from burst_portable.config import LauncherEnv
from burst_portable.errors import BackendUnavailableError, BurstError, InputError, format_error, shown, unknown_name
from burst_portable.planning.hardware import HardwareSpec
from burst_portable.strategies.base import Strategy
from burst_portable.strategies.options import Option, options_of
from burst_portable.strategies.registry import classes, has_option, known, load, make_strategy, strategy_name
from burst_portable.utils.values import parse_int

if TYPE_CHECKING:
    from burst_portable.backends.base import Backend

LENGTH = "128k and 1m are 131072 and 1048576."
"""Help of an option whose value `tokens` parses."""
METAVAR = "TOKENS"
STRATEGY = f"{', '.join(known())} (the least predicted time); options follow as NAME(OPTION=VALUE, ...)."
DEFAULT_LAYOUT = "zigzag"
"""Default of `--layout`, and of `layout` in the public functions."""
_FACTORS = {"k": 1 << 10, "K": 1 << 10, "m": 1 << 20, "M": 1 << 20}


def tokens(text: str | int) -> int:
    """Parse a number of tokens: an integer, or digits followed by k (times 1,024) or m (times 1,048,576).

    The commands check the range. typer also passes the option's default, an int.

    Raises:
        typer.BadParameter: For any other text. typer adds the option's name to its message; it would drop the message
            of an `InputError`.
    """
    text = str(text)
    factor = _FACTORS.get(text[-1:])
    number = parse_int(text if factor is None else text[:-1])
    if number is None or (factor and text.startswith("-")):
        allowed = "ASCII digits, or digits with k (times 1,024) or m (times 1,048,576) after them, as 128k"
        raise typer.BadParameter(format_error("not a number of tokens", got=shown(text), allowed=allowed))
    return number * (factor or 1)


def integer_option(*, help: str, min: int | None = None, max: int | None = None) -> Any:
    """Return the declaration of an option whose value is an integer in ASCII digits, as in masks.

    typer's own integers also accept underscores, spaces, a plus sign and digits of other scripts.

    Args:
        help: Sentence of the help.
        min: Smallest allowed value. Default: any.
        max: Largest allowed value. Default: any.
    """

    def parse(text: str | int) -> int:
        number = parse_int(str(text))
        if number is None:
            raise typer.BadParameter(format_error("not an integer", got=shown(text), allowed="ASCII digits, as 1000"))
        if (min is not None and number < min) or (max is not None and number > max):
            bounds = f"at least {min}" if max is None else f"{min} to {max}"
            raise typer.BadParameter(format_error("out of range", got=shown(str(text)), allowed=bounds))
        return number

    return typer.Option(parser=parse, metavar="INTEGER", help=help)


SeqLen: TypeAlias = Annotated[
    int, typer.Option(parser=tokens, metavar=METAVAR, help=f"Tokens of the full sequence; {LENGTH}")
]
Heads: TypeAlias = Annotated[int, integer_option(help="Query heads; a multiple of the K/V heads.")]
KvHeads: TypeAlias = Annotated[int | None, integer_option(help="K/V heads. Default: as many as query heads.")]
_LAYOUTS = "contiguous, zigzag, striped, whole_documents, document_zigzag, dispatched or auto (least predicted time)."
Layout: TypeAlias = Annotated[str, typer.Option(help=_LAYOUTS)]
_RANKS_PER_NODE = "Ranks per node. Default: none; auto then ignores strategies with two levels."
RanksPerNode: TypeAlias = Annotated[int | None, integer_option(help=_RANKS_PER_NODE)]
_BACKENDS = f"auto, {', '.join(known_backends())}; `{PROGRAM} doctor` lists those that can run."
BackendName: TypeAlias = Annotated[str, typer.Option(help=_BACKENDS)]


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


def number_of_ranks(ranks: int | None, launcher: LauncherEnv | None) -> int | None:
    """Return the number of ranks of `--ranks` or of the launcher, or None if neither is given.

    Raises:
        InputError: If the two differ.
    """
    if launcher is None:
        return ranks
    if ranks not in (None, launcher.world_size):
        raise InputError(
            "--ranks and the launcher differ", got=f"--ranks {ranks}", allowed=f"{launcher.world_size}, or no --ranks"
        )
    return launcher.world_size


@contextmanager
def add_rank_to_errors(launcher: LauncherEnv | None) -> Iterator[None]:
    """Add the rank to errors under a launcher, where all ranks print and only one host may be wrong."""
    try:
        yield
    except BurstError as error:
        if launcher is None:
            raise
        raise type(error)(f"rank {launcher.rank}: {error}") from error


def choose_backend(name: str, ranks: int) -> tuple[Backend, str]:
    """Return a backend that can run this many ranks on this machine, and why "auto" chose it; "" for a named one.

    "auto" prefers an accelerator with a device per rank.

    Raises:
        UnknownNameError: If there is no backend of this name.
        BackendUnavailableError: If the backend cannot run, or for "auto", none can.
    """
    if name not in ("auto", *known_backends()):
        raise unknown_name("backend", name, ("auto", *known_backends()))
    if name != "auto":
        backend = load_backend(name)
        if reason := _unavailable_reason(backend, ranks):
            raise BackendUnavailableError(f"the backend {name!r} cannot run here", got=reason)
        return backend, ""
    backends, reasons = [], []
    for one in known_backends():
        try:
            backends.append(load_backend(one))
        except BackendUnavailableError as error:
            reasons.append(_short_reason(one, str(error)))
    for backend in sorted(backends, key=lambda b: not b.capabilities.streams):
        if not (reason := _unavailable_reason(backend, ranks)):
            return backend, "; ".join([f"chose {backend.name}", *reasons])
        reasons.append(_short_reason(backend.name, reason))
    raise BackendUnavailableError(
        "no backend can run here", got="; ".join(reasons), next_step="run `burst-portable doctor`"
    )


def _short_reason(name: str, reason: str) -> str:
    """Return why a backend is not used, without the next step, which `burst-portable doctor` prints."""
    return f"not {name}: {reason.partition(';')[0]}"


def _unavailable_reason(backend: Backend, ranks: int) -> str | None:
    """Return why a backend cannot run this many ranks on this machine, or None if it can."""
    probe = probed(backend)
    if not probe.ok:
        return probe.reason
    if backend.capabilities.streams:
        import torch

        count = torch.get_device_module(backend.capabilities.device_type).device_count()
        if count < ranks:
            return f"{count} devices for {ranks} ranks"
    return None
