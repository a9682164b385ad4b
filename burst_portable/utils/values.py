"""Convert numbers that users pass: Python's, NumPy's, and tensors of one element. Never truncate floats to ints."""

from __future__ import annotations

from typing import TypeVar

from burst_portable.errors import InputError, UnsupportedError, shown

T = TypeVar("T")


def hide_dataclass(kind: type[T]) -> type[T]:
    """Remove the mark of a dataclass from a class, so that other libraries do not copy its objects.

    torch copies every dataclass among a module's arguments field by field when it casts them (FSDP2 with mixed
    precision, DDP too). Fields that `__init__` does not accept raise an error there, and thousands of regions are slow.
    """
    del kind.__dataclass_fields__  # type: ignore[attr-defined]  # mypy has no type for dataclasses here
    return kind


_LARGEST_INT = (1 << 63) - 1
_TOO_LARGE = 1 << 48  # larger than any sequence: products and mask bounds fit in 64 bits


def as_int(value: object) -> int | None:
    """Return the whole number that a value is; None for a float, a bool, a string, or a number beyond 64 bits."""
    if type(value) is not int:
        value = _scalar(value)
        if not isinstance(value, int) or isinstance(value, bool):
            return None
        value = int(value)
    return value if -_LARGEST_INT <= value <= _LARGEST_INT else None


def as_float(value: object) -> float | None:
    """Return a value as a float. None for a bool, a string or anything else."""
    if type(value) is float:
        return value
    value = _scalar(value)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value)
    except OverflowError:  # an int beyond every float
        return None


def _scalar(value: object) -> object:
    """Return the Python number of a NumPy scalar or a tensor without dimensions; other values unchanged."""
    if not hasattr(value, "item") or getattr(value, "ndim", None) != 0:
        return value
    try:
        return value.item()
    except RuntimeError:  # a tensor without data
        return value


def parse_int(text: str) -> int | None:
    """Return the number that a text spells in ASCII digits, with - before them if it is negative; None for other texts.

    Python's `int` also accepts underscores, spaces, a plus sign and digits of other scripts.
    """
    if not (text.isascii() and text.removeprefix("-").isdecimal()):
        return None
    try:
        return int(text)
    except ValueError:  # thousands of digits
        return None


def size(name: str, value: object) -> int:
    """Return a whole number of at least 1 and below 2**48. Raise `InputError` with the argument's name otherwise.

    Raises:
        UnsupportedError: If it is a symbol of torch.export or FakeTensorMode, for which no plan can be made.
    """
    number = as_int(value)
    if number is None and is_symbolic(value):
        raise symbolic_error(name, value)
    if (number is not None and number >= _TOO_LARGE) or (type(value) is int and value > _LARGEST_INT):
        raise InputError(f"{name} is not a size", got=shown(value), allowed="an int below 2**48")
    if number is None or number < 1:
        raise InputError(f"{name} is not a size", got=shown(value), allowed="an int of at least 1")
    return number


def is_symbolic(value: object) -> bool:
    """Return whether a size is a symbol of a graph that torch traces. This module works without torch."""
    return type(value).__name__ == "SymInt"


def symbolic_error(name: str, value: object) -> UnsupportedError:
    """Return the error for a symbolic size."""
    what, next_step = "symbolic sizes are not supported", "export one program for each size, without dynamic_shapes"
    return UnsupportedError(what, got=f"{name}={value}", next_step=next_step)


_MOST_LISTED = 1 << 14  # ranks whose divisors are listed in an error


def check_divides(ranks_per_node: int, ranks: int) -> None:
    """Raise `InputError` unless all nodes have the same number of ranks."""
    if ranks % ranks_per_node:
        raise InputError(
            "ranks_per_node does not divide the number of ranks",
            got=f"ranks_per_node={ranks_per_node}, {ranks} ranks",
            # Finding the divisors of a mistyped number may take days.
            allowed=", ".join(map(str, divisors(ranks))) if ranks <= _MOST_LISTED else "one of its divisors",
        )


def divisors(ranks: int) -> list[int]:
    """Return the possible numbers of ranks per node."""
    return [i for i in range(1, ranks + 1) if ranks % i == 0]
