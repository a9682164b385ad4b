"""The same bits every time, where that is claimed; and an error that does not grow with the number of ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch

from burst_portable.conformance.cases import Case
from burst_portable.conformance.oracle import FLOOR, Answer, Inputs, expected, make_inputs, relative_error
from burst_portable.conformance.running import run_case
from burst_portable.conformance.trial import Check, Outcome, Subject, Trial, plain
from burst_portable.errors import UnsupportedError

NAME = "steady"
GROWTH = 1.25
"""How much larger the error may be than on the fewest ranks."""


def trials(subject: Subject) -> Iterator[Trial]:
    """Each repeated thrice; each dtype over a growing number of ranks."""
    quick = subject.effort == "quick"
    for case in (
        Case(ranks=4, strategy="burst", mask="documents", layout="document_zigzag"),
        Case(ranks=3, strategy="ring", dtype=torch.bfloat16),
        Case(ranks=2, strategy="ulysses", heads="mqa"),
    ):
        if case.ranks <= subject.ranks:
            yield plain(NAME, f"same-bits-{case}", _repeat, subject, case)
    for dtype in (torch.bfloat16,) if quick else (torch.float32, torch.bfloat16, torch.float16):
        for strategy in ("burst",) if quick else ("ring", "burst"):
            short = str(dtype).removeprefix("torch.")
            yield plain(NAME, f"flat-error-{strategy}-{short}", _growth, subject, dtype, strategy)


def _repeat(subject: Subject, case: Case) -> Outcome:
    x = make_inputs(case)
    try:
        first, *others = (run_case(subject, case, x) for _ in range(3))
    except UnsupportedError as refusal:
        return Outcome(skipped=str(refusal))
    for other in others:
        if name := first.differs(other):
            return Outcome(wrong=f"{name} has other bits the second time, though deterministic was asked for")
    return Outcome()


def _growth(subject: Subject, dtype: torch.dtype, strategy: str) -> Outcome:
    try:
        return grown(subject, dtype, strategy, lambda case, x: run_case(subject, case, x))
    except UnsupportedError as refusal:
        return Outcome(skipped=str(refusal))


def grown(subject: Subject, dtype: torch.dtype, strategy: str, run: Callable[[Case, Inputs], Answer]) -> Outcome:
    """The largest error over numbers of ranks, against that of the fewest; errors below rounding do not count."""
    counts = (2, 4, 8, 16, 32, 64) if subject.effort == "full" else (2, 32)
    smallest: dict[str, float] = {}
    worst: dict[str, tuple[float, float]] = {}
    for ranks in counts:
        case = Case(ranks=ranks, strategy=strategy, dtype=dtype, length=256, batch=1, heads="2x1x64x64")
        x = make_inputs(case)
        x = replace(x, q=x.q * 4)  # scores as far apart as in trained attention
        exact, _ = expected(case, x)
        for name, value in run(case, x).quantities().items():
            error = relative_error(value, exact.quantities()[name])
            least = smallest[name] = min(error, smallest.get(name, error))
            allowed = GROWTH * max(least, FLOOR[dtype] / 8)
            worst[name] = max(worst.get(name, (0.0, allowed)), (error, allowed))
    return Outcome(worst)


CHECK = Check(NAME, "the same bits every time; an error that is flat in the number of ranks", trials)
