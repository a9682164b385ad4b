"""Trials in several processes at once: on a GPU nearly all of their time is compiling, which needs cores.

Each process lists the same trials and is given their numbers. One that dies, or never finishes, fails its trial,
which is named, and another takes its place; so does one whose trial failed, for what a device keeps of an error
(CUDA's, say) is of its process.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from queue import SimpleQueue

from burst_portable.conformance.making import Maker, listed, result_of
from burst_portable.conformance.poison import examining
from burst_portable.conformance.processes import carried, deaf_to_interrupts, unpacked
from burst_portable.conformance.report import Result
from burst_portable.conformance.subject import Subject
from burst_portable.conformance.trial import Outcome, Trial

_LAST_WORDS = 5.0  # seconds that a process gets to end
_LONGEST = 900.0  # seconds for a trial, including the process's start and everything compiled for it

Made = tuple[Outcome, Result]


def side_by_side(
    subject: Subject,
    only: Sequence[str],
    cases: Sequence[str],
    trials: Sequence[Trial],
    processes: int,
    *,
    shrink: bool,
) -> Generator[Made]:
    """The result of each trial, in order; `only` and `cases` list the same trials in the other processes."""
    workers = [_Worker(subject, only, cases, shrink) for _ in range(min(processes, len(trials)))]
    idle: SimpleQueue[_Worker] = SimpleQueue()
    for worker in workers:
        idle.put(worker)

    def make(number: int) -> Made:
        worker = idle.get()
        try:
            return worker.make(number, trials[number])
        finally:
            idle.put(worker)

    threads = ThreadPoolExecutor(len(workers), thread_name_prefix="trials")
    try:
        yield from threads.map(make, range(len(trials)))
    finally:
        threads.shutdown(wait=False, cancel_futures=True)
        for worker in workers:
            worker.give_up()
        threads.shutdown()
        for worker in workers:
            worker.end()


class _Worker:
    """A process, started with its first trial, and again after one that failed."""

    def __init__(self, subject: Subject, only: Sequence[str], cases: Sequence[str], shrink: bool) -> None:
        self._subject, self._arguments = subject, (carried(subject), only, cases, shrink)
        self._process: multiprocessing.process.BaseProcess | None = None

    def make(self, number: int, trial: Trial) -> Made:
        """Ask for one trial and wait for its result."""
        if self._process is None:
            self._start()
        try:
            self._pipe.send(number)
            made = self._pipe.recv() if self._pipe.poll(_LONGEST) else self._hangs(trial)
        except (EOFError, OSError):
            made = self._died(trial)
        if not made[0].ok:
            self.end()
        return made

    def give_up(self) -> None:
        """Kill the process: nobody waits for it."""
        if self._process is not None:
            self._process.kill()

    def end(self) -> None:
        """Let the process end by itself, as it does when nobody asks any more; kill it if it does not."""
        if self._process is not None:
            self._pipe.close()
            self._process.join(_LAST_WORDS)
            self._process.kill()
            self._process.join()
            self._process = None

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, *self._arguments))
        with deaf_to_interrupts():
            self._process.start()
        theirs.close()

    def _hangs(self, trial: Trial) -> Made:
        self.give_up()
        outcome = Outcome(wrong=f"it had not ended after {_LONGEST:g} s, and its process was ended")
        return outcome, result_of(self._subject, trial, outcome, _LONGEST)

    def _died(self, trial: Trial) -> Made:
        assert self._process is not None, "it was asked"
        self._process.join(_LAST_WORDS)
        outcome = Outcome(wrong=f"its process ended with exit code {self._process.exitcode}")
        return outcome, result_of(self._subject, trial, outcome, 0.0)


def _serve(pipe: Connection, subject: Subject, only: Sequence[str], cases: Sequence[str], shrink: bool) -> None:
    """One process: receives numbers of trials and sends their results, until nobody asks any more."""
    subject = unpacked(subject)
    with examining():
        trials, maker = listed(subject, only, cases), Maker(subject, shrink)
        while True:
            try:
                number = pipe.recv()
            except (EOFError, ConnectionResetError):
                return
            made = maker.make(trials[number])
            try:
                pipe.send(made)
            except (BrokenPipeError, ConnectionResetError):  # the first process is gone
                return
