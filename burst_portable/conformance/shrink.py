"""From a case that fails to the smallest one that still does: fewer ranks, shorter, simpler in every choice."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch

from burst_portable.conformance.cases import Case

_SIMPLER: dict[str, tuple[object, ...]] = {
    "strategy": ("ring", "burst", "ulysses"),
    "layout": ("contiguous", "zigzag"),
    "mask": ("full", "causal", "window", "documents"),
    "dtype": (torch.float32,),
    "heads": ("1x1x8x8", "2x1x8x8", "mha", "gqa"),
    "values": ("usual",),
    "memory": ("rows",),
    "softcap": (None,),
    "sinks": (False,),
    "scale": (None,),
    "deterministic": (True,),
    "batch": (1,),
}
"""The simplest first; a value may only become one that stands before it."""


def smallest(case: Case, fails: Callable[[Case], bool], *, attempts: int = 80, seconds: float = 30.0) -> Case:
    """The smallest case found for which `fails` is true, which it is for the given one. Greedy, and bounded."""
    until = time.monotonic() + seconds
    while True:
        for simpler in candidates(case):
            if attempts <= 0 or time.monotonic() > until:
                return case
            attempts -= 1
            if fails(simpler):
                case = simpler
                break
        else:
            return case


def candidates(case: Case) -> Iterator[Case]:
    """Cases that are smaller in one choice, the largest steps first."""
    for ranks in (1, 2, 3, case.ranks // 2, case.ranks - 1):
        if 0 < ranks < case.ranks:
            yield from _possible(case, ranks=ranks)
    for length in (4, 8, case.length // 2, case.length - case.length // 4, case.length - 1):
        if 1 < length < case.length:
            yield from _possible(case, length=length)
    for name, values in _SIMPLER.items():
        now = getattr(case, name)
        before = values[: values.index(now)] if now in values else values
        for value in before:
            yield from _possible(case, **{name: value})


def _possible(case: Case, **changes: Any) -> Iterator[Case]:
    changed = replace(case, **changes)
    if changed.possible():
        yield changed
