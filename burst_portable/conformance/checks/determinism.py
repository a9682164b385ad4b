"""Test that attention has the same bits every time, and an error that does not grow with ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch

from burst_portable.conformance import oracle
from burst_portable.conformance.base import BackendUnderTest, Check, Outcome, TestCase, make_plain_test, skippable
from burst_portable.conformance.cases import (
    DTYPES,
    Case,
)
from burst_portable.conformance.oracle import Answer, Inputs, expected, make_inputs
from burst_portable.conformance.running import run_case

GROWTH = 1.25
"""Largest allowed ratio of an error to the error on fewer ranks."""


def _determinism_tests(target: BackendUnderTest) -> Iterator[TestCase]:
    """Yield each case three times, and each dtype over a growing number of ranks."""
    quick = target.coverage == "quick"
    for case in (
        Case(ranks=4, strategy="burst", mask="documents", layout="document_zigzag"),
        Case(ranks=3, strategy="ring", dtype=torch.bfloat16),
        Case(ranks=2, strategy="ulysses", heads="mqa"),
    ):
        if case.ranks <= target.ranks:
            yield make_plain_test("determinism", f"same-bits-{case}", _repeat, target, case)
    for dtype in ("bfloat16",) if quick else ("float32", "bfloat16", "float16"):
        for strategy in ("burst",) if quick else ("ring", "burst"):
            title = f"flat-error-{strategy}-{dtype}"
            yield make_plain_test("determinism", title, _growth, target, DTYPES[dtype], strategy)


@skippable
def _repeat(target: BackendUnderTest, case: Case) -> Outcome:
    x = make_inputs(case)
    first, *repeats = (run_case(target, case, x) for _ in range(3))
    for repeat in repeats:
        if name := first.differs(repeat):
            return Outcome(wrong=f"{name} has other bits in a repeated run with deterministic=True")
    return Outcome()


@skippable
def _growth(target: BackendUnderTest, dtype: torch.dtype, strategy: str) -> Outcome:
    return compare_growth(target, dtype, strategy, lambda case, x: run_case(target, case, x))


def compare_growth(
    target: BackendUnderTest, dtype: torch.dtype, strategy: str, run: Callable[[Case, Inputs], Answer]
) -> Outcome:
    """Check that errors do not grow with the number of ranks. Errors below rounding do not count."""
    counts = (2, 4, 8, 16, 32, 64) if target.coverage == "full" else (2, 32)
    smallest: dict[str, float] = {}
    worst: dict[str, tuple[float, float]] = {}
    for ranks in counts:
        case = Case(ranks=ranks, strategy=strategy, dtype=dtype, length=256, batch=1, heads="2x1x64x64")
        x = make_inputs(case)
        x = replace(x, q=x.q * 4)  # scores with the spread of trained attention
        exact, _ = expected(case, x)
        for name, value in run(case, x).quantities().items():
            error = oracle.relative_error(value, exact.quantities()[name])
            least = smallest[name] = min(error, smallest.get(name, error))
            allowed = GROWTH * max(least, oracle.FLOOR[dtype] / 8)
            worst[name] = max(worst.get(name, (0.0, allowed)), (error, allowed))
    return Outcome(worst)


CHECK = Check(
    "determinism", "the same bits every time; an error that is flat in the number of ranks", _determinism_tests
)
