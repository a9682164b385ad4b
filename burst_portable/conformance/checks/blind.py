"""Rows that see nothing, and keys that nobody sees: out 0, LSE -inf, gradients 0 - exactly."""

from __future__ import annotations

from collections.abc import Iterator

from burst_portable.conformance.cases import DTYPES, LENGTH, Case
from burst_portable.conformance.checks.attending import case_trial, case_trials
from burst_portable.conformance.trial import Check, Subject, Trial

NAME = "blind"


def cases(subject: Subject) -> Iterator[Case]:
    """Yield masks with blind rows, by every strategy and dtype."""
    quick = subject.effort == "quick"
    for strategy in ("ring", "burst") if quick and not subject.strategy else subject.strategies:
        yield Case(mask="rows_see_nothing", strategy=strategy, ranks=2)
        yield Case(mask="custom", strategy=strategy, layout="striped", ranks=3, sinks=strategy == "burst")
    for dtype in () if quick or subject.strategy else DTYPES.values():
        for ranks in (1, 2, 3, 8):
            yield Case(mask="rows_see_nothing", dtype=dtype, ranks=ranks, layout="contiguous", length=LENGTH)


def trials(subject: Subject) -> Iterator[Trial]:
    """See `cases`."""
    yield from case_trials(NAME, subject, (case for case in cases(subject) if case.possible()))


def of_case(subject: Subject, case: Case, kernel: str) -> Trial:
    """Any case."""
    return case_trial(NAME, subject, case)


CHECK = Check(NAME, "rows that see nothing: out 0, LSE -inf, gradients 0", trials, of_case, by_strategy=True)
