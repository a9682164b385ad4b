"""Define the options that several commands share: lengths, sizes, dtypes, layouts, ranks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any, TypeAlias

import typer

from burst_portable.backends.selection import known as known_backends
from burst_portable.cli import PROGRAM
from burst_portable.config import LauncherEnv
from burst_portable.errors import BurstError, InputError, format_error, shown
from burst_portable.strategies.registry import known
from burst_portable.utils.values import parse_int

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


def tokens_option(*, help: str) -> Any:
    """Return the declaration of an option whose value `tokens` parses. `help`: Sentence of the help."""
    return typer.Option(parser=tokens, metavar=METAVAR, help=help)


DTYPES = ("float32", "bfloat16", "float16", "float64")
SeqLen: TypeAlias = Annotated[int, tokens_option(help=f"Tokens of the full sequence; {LENGTH}")]
Heads: TypeAlias = Annotated[int, integer_option(help="Query heads; a multiple of the K/V heads.")]
KvHeads: TypeAlias = Annotated[int | None, integer_option(help="K/V heads. Default: as many as query heads.")]
VHeadDim: TypeAlias = Annotated[int | None, integer_option(help="Elements per value head. Default: as --head-dim.")]
DeviceDtype: TypeAlias = Annotated[
    str | None, typer.Option(help=f"{', '.join(DTYPES)}. Default: bfloat16; float32 on CPUs.")
]
Dropout: TypeAlias = Annotated[float, typer.Option(help="Probability of dropout of attention weights.")]
_LAYOUTS = "contiguous, zigzag, striped, whole_documents, document_zigzag, dispatched or auto (least predicted time)."
Layout: TypeAlias = Annotated[str, typer.Option(help=_LAYOUTS)]
_RANKS_PER_NODE = "Ranks per node. Default: none; auto then ignores strategies with two levels."
RanksPerNode: TypeAlias = Annotated[int | None, integer_option(help=_RANKS_PER_NODE)]
_BACKENDS = f"auto, {', '.join(known_backends())}; `{PROGRAM} doctor` lists those that can run."
BackendName: TypeAlias = Annotated[str, typer.Option(help=_BACKENDS)]


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
