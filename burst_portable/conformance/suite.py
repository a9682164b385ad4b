"""Run the tests of a backend and return a report: `check_backend`."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import closing
from datetime import UTC, datetime

import torch

from burst_portable import __version__
from burst_portable.backends.base import Backend
from burst_portable.backends.selection import choose_kernel, kernels_of, known, load, probed
from burst_portable.conformance.base import COVERAGES, BackendUnderTest, TestCase, Wrap, identity
from burst_portable.conformance.cases import Case, strategy_trials
from burst_portable.conformance.checks.kernel_contract import unsupported_reason
from burst_portable.conformance.fresh_memory import testing_environment
from burst_portable.conformance.parallel_runner import TEST_TIMEOUT, run_in_processes
from burst_portable.conformance.report import EVIDENCE_LEVELS, NOT_STATED, Report, Result
from burst_portable.conformance.runner import Runner
from burst_portable.conformance.selection import select_tests
from burst_portable.errors import BackendUnavailableError, BurstError, InputError, UnsupportedError, unknown_name
from burst_portable.kernels.base import Kernel, LazyKernel

Progress = Callable[[int, int, TestCase, Result | None], None]
"""Called before each test (with None) and after it: number of finished tests, number of all, test, result."""


def check_backend(
    backend: str | Backend,
    *,
    ranks: int = 8,
    only: Iterable[str] = (),
    cases: Sequence[str] = (),
    coverage: str = "usual",
    kernel: str = "auto",
    evidence_level: str | None = None,
    fail_fast: bool = False,
    wrap: Wrap = identity,
    timeout: float = 60.0,
    processes: int = 1,
    progress: Progress | None = None,
    test_timeout: float = TEST_TIMEOUT,
    strategy: str = "",
) -> Report:
    """Test everything that a backend must fulfill, and return a report.

    Args:
        backend: Name of the backend, or the backend itself.
        ranks: Largest number of ranks of a case. They are threads, and processes in the group "group".
        only: Names of groups of checks, see `conformance.checks.CHECKS`. Default: all.
        cases: Names of single tests (``attention:mask=full,ranks=3``), instead of groups.
        coverage: "quick" (seconds on a CPU, minutes if kernels are compiled), "usual" (every pair of choices) or "full"
            (products of choices, an hour).
        kernel: Name of the one kernel to test, or "auto" for all.
        evidence_level: Kind of evidence, see `report.EVIDENCE_LEVELS`. Default: the probe's fact of this name, else
            "not stated".
        fail_fast: Whether to stop at the first failure, without a search for its smallest case.
        wrap: Wrapper of the transports between ranks that are threads, for tests of this suite.
        timeout: Seconds until a waiting rank raises `CommunicationTimeoutError`.
        processes: Number of processes that run tests concurrently on the same devices. 1 uses only this process. More
            are spawned: a script needs ``if __name__ == "__main__":``.
        progress: Callback for every test, in order: see `Progress`.
        test_timeout: Seconds for one test, if `processes` is above 1.
        strategy: Name of the one strategy to test. Default: all groups, with the built-in strategies.

    Returns:
        The report. `report.ok` is true if at least one test ran and none failed.

    Raises:
        InputError: If a name is unknown, a number is out of range, or no test was selected.
        BackendUnavailableError: If the backend cannot run on this machine.
    """
    backend = load(backend) if isinstance(backend, str) else backend
    target = BackendUnderTest(backend, ranks, coverage, kernel, wrap, timeout, strategy)
    facts = _check_available(backend)
    _check_arguments(target, evidence_level, processes)
    only, cases, shrink = tuple(only), tuple(cases), not fail_fast
    started, results, on_progress = time.monotonic(), list[Result](), progress or (lambda *_: None)
    with testing_environment():
        tests = select_tests(target, only, cases)
        if not tests:
            raise _explain_no_tests(target, only)
        if processes == 1:
            runner = Runner(target, shrink)
            every: Generator[Result] = (runner.run(test) for test in tests)
        else:
            every = run_in_processes(target, only, cases, tests, processes, shrink=shrink, timeout=test_timeout)
        with closing(every):
            for number, test in enumerate(tests):
                on_progress(number, len(tests), test, None)
                results.append(next(every))
                on_progress(number + 1, len(tests), test, results[-1])
                if fail_fast and not results[-1].ok:
                    break
    return Report(
        backend=backend.name,
        evidence_level=evidence_level or str(facts.get("evidence_level", NOT_STATED)),
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        seconds=time.monotonic() - started,
        ranks=ranks,
        coverage=coverage,
        kernel=kernel,
        only=only or cases,
        kernels=tuple(k.name for k in kernels_of(backend)),
        device={
            "type": backend.capabilities.device_type,
            "from": known().get(backend.name, type(backend).__module__),
            **{name: str(value) for name, value in sorted(facts.items())},
        },
        versions={
            "burst_portable": __version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
            "platform": platform.platform(),
        },
        results=tuple(results),
        not_examined=_not_examined(target, results),
        strategy=strategy,
    )


def _not_examined(target: BackendUnderTest, results: Sequence[Result]) -> dict[str, str]:
    """Return the kernels that computed in no test, with the reason."""
    computed = {name for result in results for name in result.kernels}
    return {
        kernel.name: _unused_reason(kernel, target, results)
        for kernel in kernels_of(target.backend)
        if kernel.name not in computed
    }


def _unused_reason(kernel: Kernel | LazyKernel, target: BackendUnderTest, results: Sequence[Result]) -> str:
    """Return why a kernel computed in no test."""
    named = [r for r in results if r.name.startswith((f"{kernel.name}:", f"{kernel.name}-"))]
    if any(not r.ok for r in named):
        return "its tests failed before it computed"
    if reason := unsupported_reason(kernel, target.device.type):
        return f"it declined: {reason}"
    return "its tests were skipped" if any(r.skipped for r in named) else "no selected test computed with it"


def _explain_no_tests(target: BackendUnderTest, only: Sequence[str]) -> BurstError:
    """Return the error for groups without tests, or for a strategy that supports no case, with the first reason."""
    if not target.strategy:
        got = f"{', '.join(only)} with {target.ranks} ranks"
        return InputError("no test was selected", got=got, next_step="pass more ranks, or other groups of checks")
    reason = ""
    for case in (Case(strategy=label) for label in target.strategies):
        try:
            case.make_strategy().check(case.make_call())
        except (InputError, UnsupportedError) as error:
            reason = reason or f"{case.strategy}: {error}"
    what = f"the strategy {target.strategy!r} supports none of these cases"
    return UnsupportedError(what, got=reason, next_step="try more ranks, or other groups of checks")


def _check_arguments(target: BackendUnderTest, evidence_level: str | None, processes: int) -> None:
    for name, count, most in (("processes", processes, 256), ("ranks", target.ranks, 64)):
        if type(count) is not int or not 1 <= count <= most:
            raise InputError(f"{name} must be an integer", got=count, allowed=f"1 to {most}")
    if target.coverage not in COVERAGES:
        raise unknown_name("coverage", target.coverage, COVERAGES)
    if evidence_level is not None and evidence_level not in EVIDENCE_LEVELS:
        raise unknown_name("evidence level", evidence_level, EVIDENCE_LEVELS)
    if target.strategy:
        strategy_trials(target.strategy)  # raises if the name is unknown
    if target.kernel != "auto" and target.kernel not in [k.name for k in kernels_of(target.backend)]:
        # Raises with the allowed names.
        choose_kernel(target.backend, Case().make_call(target.device.type), target.kernel)


def _check_available(backend: Backend) -> dict[str, object]:
    """Return the facts of the probe. Raise `BackendUnavailableError` if the backend cannot run here."""
    probe = probed(backend)
    if not probe.ok:
        what = f"the backend {backend.name!r} cannot run here"
        raise BackendUnavailableError(f"{what}: {probe.reason}")
    kind, step = backend.capabilities.device_type, "import the vendor's package in the probe"
    try:
        found = torch.device(kind)
    except RuntimeError as error:
        what = f"the probe of the backend {backend.name!r} succeeded, but torch does not support its device type"
        raise BackendUnavailableError(what, got=repr(kind), next_step=step) from error
    if found.index is not None:  # calls are compared with it by the type of their device
        what, step = f"the backend {backend.name!r} states a device, not a device type", "change its capabilities"
        raise BackendUnavailableError(what, got=repr(kind), allowed=repr(found.type), next_step=step)
    if (level := probe.facts.get("evidence_level", NOT_STATED)) not in EVIDENCE_LEVELS:
        raise unknown_name(f"evidence level in the probe of the backend {backend.name!r}", level, EVIDENCE_LEVELS)
    return dict(probe.facts)
