"""Run tests of a backend in several processes, of which each runs one test at a time."""

from __future__ import annotations

import multiprocessing
from collections.abc import Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from queue import SimpleQueue

from burst_portable.conformance.base import BackendUnderTest, Outcome, TestCase
from burst_portable.conformance.fresh_memory import testing_environment
from burst_portable.conformance.processes import ignore_interrupts, pack, unpack
from burst_portable.conformance.report import Result
from burst_portable.conformance.runner import Runner, make_result
from burst_portable.conformance.selection import select_tests

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
