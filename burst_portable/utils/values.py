"""Numbers as users pass them: Python's, NumPy's, and tensors that hold one. Floats are never truncated to ints."""

from __future__ import annotations

from typing import TypeVar

from burst_portable.errors import InputError, shown

T = TypeVar("T")


def opaque(kind: type[T]) -> type[T]:
    """Let others not see that a class is a dataclass, so that they leave its objects alone.

    torch makes every dataclass among a module's arguments anew, field by field, where it casts them (FSDP2 under
    mixed precision, DDP too): fields without a place in `__init__` raise there, and thousands of regions take long.
    """
    del kind.__dataclass_fields__  # type: ignore[attr-defined]  # of dataclasses, which mypy does not know here
    return kind


_LARGEST_INT = (1 << 63) - 1
_TOO_LARGE = 1 << 48  # larger than any sequence; keeps products and mask bounds within 64 bits


def as_int(value: object) -> int | None:
    """Return the whole number that a value is; None for a float, a bool, a string, or a number beyond 64 bits."""
    if type(value) is not int:
        value = _scalar(value)
        if not isinstance(value, int) or isinstance(value, bool):
            return None
        value = int(value)
    return value if -_LARGEST_INT <= value <= _LARGEST_INT else None


def as_float(value: object) -> float | None:
    """The number that a value is; None for a bool, a string or anything else."""
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
    """The Python number inside a NumPy scalar or a tensor without dimensions."""
    if not hasattr(value, "item") or getattr(value, "ndim", None) != 0:
        return value
    try:
        return value.item()
    except RuntimeError:  # a tensor that holds no data
        return value


def size(name: str, value: object) -> int:
    """A whole number of at least 1 and below 2**48, or an `InputError` that says what `name` may be."""
    number = as_int(value)
    if number is None or number < 1:
        raise InputError(f"{name} is not a size", got=shown(value), allowed="an int of at least 1")
    if number >= _TOO_LARGE:
        raise InputError(f"{name} is not a size", got=shown(value), allowed="an int below 2**48")
    return number


def check_divides(ranks_per_node: int, ranks: int) -> None:
    """Refuse nodes that are not all of one size."""
    if ranks % ranks_per_node:
        raise InputError(
            "that node size does not divide the ranks",
            got=f"ranks_per_node={ranks_per_node}, {ranks} ranks",
            allowed=", ".join(map(str, divisors(ranks))),
        )


def divisors(ranks: int) -> list[int]:
    """The sizes that nodes may have."""
    return [i for i in range(1, ranks + 1) if ranks % i == 0]
