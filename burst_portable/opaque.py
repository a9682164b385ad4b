"""Dataclasses that others hand on as they are."""

from __future__ import annotations

from typing import TypeVar

T = TypeVar("T")


def opaque(kind: type[T]) -> type[T]:
    """Let others not see that a class is a dataclass, so that they leave its objects alone.

    torch makes every dataclass among a module's arguments anew, field by field, where it casts them (FSDP2 under
    mixed precision, DDP too): fields without a place in `__init__` raise there, and thousands of regions take long.
    """
    del kind.__dataclass_fields__  # type: ignore[attr-defined]  # of dataclasses, which mypy does not know here
    return kind
