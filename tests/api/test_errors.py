"""Test `burst_portable.errors`."""

from __future__ import annotations

import pickle

import pytest

from burst_portable import errors
from burst_portable.errors import BurstError, first_line, in_a_line

CLASSES = [c for c in vars(errors).values() if isinstance(c, type) and issubclass(c, BurstError)]


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
def test_error_composes_message(kind: type[BurstError]) -> None:
    error = kind("wrong rank", got=0, allowed="1 to 3", next_step="name another")
    assert str(error) == "wrong rank; got 0; allowed: 1 to 3; name another"
    assert str(kind("only this")) == "only this"


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
def test_error_survives_pickling_and_rewording(kind: type[BurstError]) -> None:
    error = kind("wrong rank", got=0)
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is kind
    assert str(copy) == str(error)
    assert str(type(error)(f"{error}; rank 1 said so")) == "wrong rank; got 0; rank 1 said so"


def test_long_texts_of_other_code_are_cut() -> None:
    """torch lists all its backends in one line of 1,800 characters if it has none for a device."""
    error = RuntimeError("Could not run " + "x" * 2000 + "\nsecond line")
    assert first_line(error) == "Could not run " + "x" * 386 + "..."
    assert in_a_line(error, most=30) == "RuntimeError: Could not run xx..."
    assert first_line(RuntimeError("short\nsecond line")) == "short"
    assert first_line(RuntimeError()) == "RuntimeError"
