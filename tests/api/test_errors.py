"""Test `burst_portable.errors`."""

from __future__ import annotations

import pickle

import pytest

from burst_portable import errors
from burst_portable.errors import BurstError

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
