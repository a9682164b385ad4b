"""Run the tests of a backend and return a report: `check_backend`."""

from __future__ import annotations

import multiprocessing
import platform
import re
import shlex
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from queue import SimpleQueue
from typing import Any

import torch

from burst_portable import __version__
from burst_portable.backends.base import Backend
from burst_portable.backends.selection import choose_kernel, kernels_of, known, load, probed
from burst_portable.conformance.base import (
    COVERAGES,
    BackendUnderTest,
    Outcome,
    TestCase,
    Wrap,
    describe_error,
    identity,
    recorded_kernels,
)
from burst_portable.conformance.cases import Case, strategy_trials
from burst_portable.conformance.checks import CHECKS
from burst_portable.conformance.checks.kernel_contract import unsupported_reason
from burst_portable.conformance.checks.plans import PLAN_ERROR
from burst_portable.conformance.processes import ignore_interrupts, pack, unpack
from burst_portable.conformance.report import EVIDENCE_LEVELS, NOT_STATED, Report, Result
from burst_portable.conformance.running import testing_environment
from burst_portable.errors import BackendUnavailableError, BurstError, InputError, UnsupportedError, unknown_name
from burst_portable.kernels.base import Kernel, LazyKernel

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


_NUMBER = re.compile(r"[0-9]+")
_LONG_SEARCHES = 3  # failures per group with a long search for the smallest case; later ones are mostly similar
_LONG, _SHORT = 80, 12  # runs per search


def select_tests(target: BackendUnderTest, only: Iterable[str] = (), cases: Sequence[str] = ()) -> list[TestCase]:
    """Return the tests of some names, or of some groups, or all."""
    return [find_test(target, text) for text in cases] or list(list_tests(target, only))


def list_tests(target: BackendUnderTest, only: Iterable[str] = ()) -> Iterator[TestCase]:
    """Yield all tests, or those of some groups."""
    available = [name for name, check in CHECKS.items() if check.by_strategy or not target.strategy]
    names = tuple(only) or tuple(available)
    for name in names:
        if name not in CHECKS:
            raise unknown_name("group of checks", name, CHECKS)
        if name not in available:
            raise InputError(f"the group {name!r} has no tests of a strategy", allowed=", ".join(available))
    for name in CHECKS:
        if name in names:
            yield from CHECKS[name].tests(target)


def find_test(target: BackendUnderTest, text: str) -> TestCase:
    """Return the test of a name: ``group:case``, ``kernels:kernel:case`` or ``group:name``."""
    group, _, name = text.partition(":")
    if group not in CHECKS:
        raise unknown_name("group of checks", group, CHECKS)
    check = CHECKS[group]
    head, colon, spec = name.rpartition(":")
    kernels = [kernel.name for kernel in kernels_of(target.backend)]
    is_case = "=" in spec or spec == "default"
    if group == "kernels" and target.kernel != "auto" and name.partition(":")[0] in set(kernels) - {target.kernel}:
        got = f"{text}, but kernel {target.kernel!r}"
        raise InputError("the test belongs to another kernel", got=got, next_step="pass only one of them")
    if check.make_test is not None and is_case and (head in kernels if group == "kernels" else not colon):
        return check.make_test(target, Case.parse(spec), head)
    every = {test.name: test for test in check.tests(replace(target, coverage="usual"))}
    if name not in every:
        raise unknown_name(f"test of {group!r}", name, every)
    return every[name]


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


_JOIN_TIMEOUT = 5.0  # seconds that a process gets to end
TEST_TIMEOUT = 900.0
"""Default seconds for a test, including the start of its process and all compilation."""


def run_in_processes(
    target: BackendUnderTest,
    only: Sequence[str],
    cases: Sequence[str],
    tests: Sequence[TestCase],
    processes: int,
    *,
    shrink: bool,
    timeout: float,
) -> Generator[Result]:
    """Yield the result of each test in order. `only` and `cases` select the same tests in the other processes.

    A test that takes more than `timeout` seconds fails, and its process is killed.
    """
    arguments = (pack(target), only, cases, shrink)
    workers = [_Worker(target, arguments, timeout) for _ in range(min(processes, len(tests)))]
    idle: SimpleQueue[_Worker] = SimpleQueue()
    for worker in workers:
        idle.put(worker)

    def run_number(number: int) -> Result:
        worker = idle.get()
        try:
            return worker.run(number, tests[number])
        finally:
            idle.put(worker)

    threads = ThreadPoolExecutor(len(workers), thread_name_prefix="tests")
    try:
        yield from threads.map(run_number, range(len(tests)))
    finally:
        threads.shutdown(wait=False, cancel_futures=True)
        for worker in workers:
            worker.kill()
        threads.shutdown()
        for worker in workers:
            worker.end()


class _Worker:
    """A process that starts with its first test, and again after each failed one."""

    def __init__(self, target: BackendUnderTest, arguments: tuple[object, ...], timeout: float) -> None:
        self._target, self._arguments, self._timeout = target, arguments, timeout
        self._process: BaseProcess | None = None

    def run(self, number: int, test: TestCase) -> Result:
        """Request one test and wait for its result."""
        process = self._process or self._start()
        try:
            self._pipe.send(number)
            if self._pipe.poll(self._timeout):
                result: Result = self._pipe.recv()
            else:
                process.kill()
                wrong = f"it did not end within {self._timeout:g} s, and its process was killed"
                result = make_result(self._target, test, Outcome(wrong=wrong), self._timeout)
        except (EOFError, OSError):
            process.join(_JOIN_TIMEOUT)
            wrong = f"its process ended with exit code {process.exitcode}"
            result = make_result(self._target, test, Outcome(wrong=wrong), 0.0)
        if not result.ok:
            self.end()
        return result

    def kill(self) -> None:
        """Kill the process."""
        if self._process is not None:
            self._process.kill()

    def end(self) -> None:
        """Close the pipe, on which the process ends by itself; kill it if it does not."""
        if self._process is not None:
            self._pipe.close()
            self._process.join(_JOIN_TIMEOUT)
            self._process.kill()
            self._process.join()
            self._process = None

    def _start(self) -> BaseProcess:
        context = multiprocessing.get_context("spawn")
        self._pipe, child_end = context.Pipe()
        self._process = context.Process(target=_serve, args=(child_end, *self._arguments))
        with ignore_interrupts():
            self._process.start()
        child_end.close()
        return self._process


def _serve(pipe: Connection, target: BackendUnderTest, only: Sequence[str], cases: Sequence[str], shrink: bool) -> None:
    """Run one process: receive numbers of tests and send their results until the pipe is closed."""
    target = unpack(target)
    with testing_environment():
        tests, runner = select_tests(target, only, cases), Runner(target, shrink)
        with suppress(EOFError, BrokenPipeError, ConnectionResetError):  # the first process is gone
            while True:
                pipe.send(runner.run(tests[pipe.recv()]))


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
