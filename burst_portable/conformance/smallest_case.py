"""Search for the smallest case that fails like a failed case."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch

from burst_portable.conformance.base import Outcome
from burst_portable.conformance.cases import Case
from burst_portable.conformance.checks.plans import PLAN_ERROR

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
    "dropout": (0.0,),
    "deterministic": (True,),
    "batch": (1,),
}
"""Simplest values first. The search for the smallest case replaces a value only by an earlier one."""
_NUMBER = re.compile(r"[0-9]+")


def smallest(case: Case, fails: Callable[[Case], bool], *, max_runs: int = 80, seconds: float = 30.0) -> Case:
    """Return the smallest case found for which `fails` is true, as it is for `case`. Greedy and bounded."""
    until = time.monotonic() + seconds
    while True:
        for simpler in candidates(case):
            if max_runs <= 0 or time.monotonic() > until:
                return case
            max_runs -= 1
            if fails(simpler):
                case = simpler
                break
        else:
            return case


def candidates(case: Case) -> Iterator[Case]:
    """Yield cases that are smaller in one choice, the largest steps first."""
    fewer = (1, 2, 3, case.ranks // 2, case.ranks - 1)
    shorter = (4, 8, case.length // 2, case.length - case.length // 4, case.length - 1)
    changes: list[dict[str, Any]] = [{"ranks": ranks} for ranks in fewer if 0 < ranks < case.ranks]
    changes += [{"length": length} for length in shorter if 1 < length < case.length]
    for name, values in _SIMPLER.items():
        current = getattr(case, name)
        simpler = values[: values.index(current)] if current in values else values
        changes += [{name: value} for value in simpler]
    return filter(Case.possible, (replace(case, **change) for change in changes))


def is_alike(found: Outcome, smaller: Outcome) -> bool:
    """Return whether a smaller case fails, too. If a plan is wrong, it must be wrong in the same way.

    A route that is wrong between ranks is often wrong in another way on one rank.
    """
    if not found.wrong.startswith(PLAN_ERROR):
        return not smaller.ok
    kinds = (_NUMBER.sub("", one.wrong.partition(";")[0].partition(", such as")[0]) for one in (found, smaller))
    return next(kinds) == next(kinds)
