"""Lengths as people type them: 131072, or 128k. The k is 1,024, as where people speak of a model's 128k tokens."""

from __future__ import annotations

import typer

from burst_portable.errors import explain, shown

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
        raise typer.BadParameter(explain("not a number of tokens", got=shown(typed), allowed=allowed)) from None
