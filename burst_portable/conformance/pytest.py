"""Decorator that turns the conformance suite into tests of another package::

    from burst_portable.conformance.pytest import backend_checks


    @backend_checks("my_backend", ranks=4)
    def test_conformance(check):
        check()

Each test of the suite becomes one pytest test with the same name: `-k sinks` selects, `-x` stops, `--junitxml` reports.
An unsupported case is skipped with the backend's reason. A failure prints the smallest failing case and a command.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import pytest

from burst_portable.backends.base import Backend
from burst_portable.backends.selection import load, probed
from burst_portable.conformance.base import BackendUnderTest, TestCase
from burst_portable.conformance.fresh_memory import testing_environment
from burst_portable.conformance.runner import Runner
from burst_portable.conformance.selection import list_tests


def _run(target: BackendUnderTest, test: TestCase) -> None:
    """Run one test, and fail or skip the pytest test."""
    with testing_environment():
        result = Runner(target).run(test)
    if not result.ok:
        text = f"{result.message}\nsmallest: {result.smallest}\nagain: {result.command}"
        pytest.fail(text, pytrace=False)
    if result.skipped:
        pytest.skip(result.skipped)


def backend_checks(
    backend: str | Backend,
    *,
    ranks: int = 8,
    only: Iterable[str] = (),
    coverage: str = "usual",
    kernel: str = "auto",
    timeout: float = 60.0,
) -> Callable[[Callable[..., Any]], Any]:
    """Parametrize a pytest test over the conformance tests of a backend. The test takes `check` and calls it.

    The test is skipped with a reason if the backend cannot run on this machine.

    Args:
        backend: Name of the backend, or the backend itself.
        ranks: Largest number of ranks of a case.
        only: Names of groups. Default: all.
        coverage: "quick", "usual" or "full".
        kernel: Name of the one kernel to test, or "auto" for all.
        timeout: Seconds until a waiting rank raises `CommunicationTimeoutError`.

    Raises:
        BackendUnavailableError: At collection, if the backend's package cannot be imported.
        InputError: At collection, if a name is unknown.
    """
    backend = load(backend) if isinstance(backend, str) else backend
    probe = probed(backend)
    if not probe.ok:
        return pytest.mark.parametrize("check", [pytest.param(None, marks=pytest.mark.skip(reason=probe.reason))])
    target = BackendUnderTest(backend, ranks, coverage, kernel, timeout=timeout)
    tests = list(list_tests(target, only))
    checks = [partial(_run, target, test) for test in tests]
    return pytest.mark.parametrize("check", checks, ids=[test.text for test in tests])
