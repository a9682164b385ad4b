"""One decorator, for the test-suite of somebody who writes a backend::

    from burst_portable.conformance.pytest import backend_checks


    @backend_checks("theirs", ranks=4)
    def test_conformance(check):
        check()

That is one test a trial, with the trial's name as its id: `-k sinks` picks, `-x` stops, `--junitxml` reports. A trial
that the backend refuses with a reason is skipped with that reason; a failure tells its smallest case and a command.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest

from burst_portable.backends.base import Backend
from burst_portable.backends.selection import load, probed
from burst_portable.conformance.running import examining
from burst_portable.conformance.suite import attempt, rerun, shrunk, trials_of
from burst_portable.conformance.trial import Subject, Trial


class TrialOf:
    """What a test receives: calling it makes the trial, and fails or skips the test."""

    def __init__(self, subject: Subject, trial: Trial) -> None:
        self.subject, self.trial = subject, trial

    def __repr__(self) -> str:
        return self.trial.text

    def __call__(self) -> None:
        with examining():
            outcome = attempt(self.trial)
            least = None if outcome.ok else shrunk(self.trial)
        if outcome.skipped and outcome.ok:
            pytest.skip(outcome.skipped)
        if not outcome.ok:
            text = self.trial.text
            if least is not None:
                text = ":".join(filter(None, (self.trial.check, self.trial.kernel, least.spec())))
            pytest.fail(f"{outcome.text()}\nsmallest: {text}\nagain: {rerun(self.subject, text)}", pytrace=False)


def backend_checks(
    backend: str | Backend,
    *,
    ranks: int = 8,
    only: Iterable[str] = (),
    effort: str = "usual",
    kernel: str = "auto",
    timeout: float = 60.0,
) -> Callable[[Callable[..., Any]], Any]:
    """Parametrizes a test over the trials of a backend; the test takes `check` and calls it.

    Arguments are those of `check_backend`. Where the backend cannot run, the test is skipped with its reason.

    Raises `BackendUnavailableError` or `InputError` when tests are collected: a backend that does not import, a
    group that does not exist.
    """
    found = load(backend) if isinstance(backend, str) else backend
    probe = probed(found)
    if not probe.ok:
        return pytest.mark.parametrize("check", [pytest.param(None, marks=pytest.mark.skip(reason=probe.reason))])
    subject = Subject(found, ranks, effort, kernel, timeout=timeout)
    checks = [TrialOf(subject, trial) for trial in trials_of(subject, only)]
    return pytest.mark.parametrize("check", checks, ids=repr)
