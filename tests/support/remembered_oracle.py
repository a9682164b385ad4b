"""Fixture: the oracle computes each attention once per test file, because planted bugs meet the same cases."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import fields
from typing import Any

import pytest
import torch
from torch import Tensor

from burst_portable.conformance import oracle
from burst_portable.conformance.oracle import Answer


def identity(value: Any) -> object:
    """Return what an argument is equal by: for a tensor its dtype, shape and bytes."""
    if not isinstance(value, Tensor):
        return value
    data = value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
    return value.dtype, value.shape, hashlib.blake2b(data).digest()


def copied(answer: Answer) -> Answer:
    """Return the answer in other memory, so that a caller that changes it changes no later one."""
    values = (getattr(answer, field.name) for field in fields(Answer))
    return Answer(*(value if value is None else value.clone() for value in values))


class Remembering:
    """A function that returns an answer, computed once for equal arguments."""

    def __init__(self, compute: Callable[..., Answer]) -> None:
        self.compute = compute
        self.answers: dict[object, Answer] = {}
        self.computed = 0

    def __call__(self, *arguments: Any, **options: Any) -> Answer:
        named = sorted(options.items())
        key = tuple(map(identity, arguments)), tuple((name, identity(value)) for name, value in named)
        if key not in self.answers:
            self.computed += 1
            self.answers[key] = self.compute(*arguments, **options)
        return copied(self.answers[key])


@pytest.fixture(scope="module")
def remembered_oracle() -> Iterator[Remembering]:
    """Replace the oracle of the conformance suite, which has the same cases for each backend and each bug."""
    remembering = Remembering(oracle.attention)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(oracle, "attention", remembering)
        yield remembering
