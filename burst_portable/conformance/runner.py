"""Run single tests of a backend, each with its time, its kernels and, if it fails, its smallest failing case."""

from __future__ import annotations

import shlex
import time
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Any

from burst_portable.conformance.base import BackendUnderTest, Outcome, TestCase, describe_error, recorded_kernels
from burst_portable.conformance.cases import Case
from burst_portable.conformance.report import Result
from burst_portable.conformance.smallest_case import is_alike, smallest

_LONG_SEARCHES = 3  # failures per group with a long search for the smallest case; later ones are mostly similar
_LONG, _SHORT = 80, 12  # runs per search


def run(test: TestCase, case: Case | None = None) -> Outcome:
    """Run a test, with its default case if `case` is None. An exception becomes a failed outcome."""
    try:
        return test.run(case or test.case or Case())
    # A backend may fail in any way, and the next test should still run.
    except Exception as error:  # noqa: BLE001
        return Outcome(wrong=describe_error(error))


@dataclass
class Runner:
    """Runs tests one after another. If `shrink` is true, it searches for the smallest failing case.

    The search takes `search_seconds`. A test that took longer, such as one with a timeout, is not repeated.
    """

    target: BackendUnderTest
    shrink: bool = True
    search_seconds: float = 30.0
    _failures: Counter[str] = field(default_factory=Counter)

    def run(self, test: TestCase) -> Result:
        """Run and time one test. If it fails, search for its smallest case."""
        started = time.monotonic()
        with recorded_kernels() as names:
            outcome = run(test)
        seconds, text = time.monotonic() - started, test.text
        if not outcome.ok:
            self._failures[test.check] += 1
            if self.shrink and test.case is not None and seconds < self.search_seconds:
                max_runs = _LONG if self._failures[test.check] <= _LONG_SEARCHES else _SHORT
                limits: dict[str, Any] = {"max_runs": max_runs, "seconds": self.search_seconds}
                least = smallest(test.case, lambda case: is_alike(outcome, run(test, case)), **limits)
                if not outcome.wrong and least != test.case and (cause := run(test, least).wrong):
                    outcome = replace(outcome, wrong=f"in the smallest case, {cause}")
                text = ":".join(filter(None, (test.check, test.kernel, least.spec())))
        result = make_result(self.target, test, outcome, seconds, text)
        return result if outcome.skipped else replace(result, kernels=tuple(sorted(names)))


def make_result(target: BackendUnderTest, test: TestCase, outcome: Outcome, seconds: float, text: str = "") -> Result:
    """Return the report's entry for an outcome. `text` names the smallest failing test. Default: this one."""
    text = text or test.text
    kernel = [] if target.kernel == "auto" else ["--kernel", target.kernel]
    selected = ["--case", text]
    if target.strategy and test.case is None:  # only then it is tested
        selected = ["--strategy", target.strategy, "--only", test.check]
    command = ["burst-portable", "conform", "--backend", target.backend.name, *kernel, *selected]
    return Result(
        check=test.check,
        name=test.name,
        ok=outcome.ok,
        seconds=round(seconds, 4),
        errors=dict(outcome.errors),
        message=outcome.text(),
        skipped=outcome.skipped,
        smallest="" if outcome.ok else text,
        command="" if outcome.ok else shlex.join(command),
    )
