"""`check_backend`: try everything that a backend must fulfil, and report on it."""

from __future__ import annotations

import multiprocessing
import platform
import shlex
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any

import torch

from burst_portable import __version__
from burst_portable.backends.base import Backend
from burst_portable.backends.selection import choose_kernel, kernels_of, known, load, probed
from burst_portable.conformance.cases import Case, strategy_trials
from burst_portable.conformance.checks import CHECKS
from burst_portable.conformance.processes import carried, deaf_to_interrupts, unpacked
from burst_portable.conformance.report import TIERS, Report, Result
from burst_portable.conformance.running import examining
from burst_portable.conformance.trial import EFFORTS, Outcome, Subject, Trial, Wrap, as_it_is, raised
from burst_portable.errors import BackendUnavailableError, InputError, UnsupportedError, unknown_name

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
    "deterministic": (True,),
    "batch": (1,),
}
"""The simplest first; a value may only become one that stands before it."""


def smallest(case: Case, fails: Callable[[Case], bool], *, attempts: int = 80, seconds: float = 30.0) -> Case:
    """The smallest case found for which `fails` is true, which it is for the given one. Greedy, and bounded."""
    until = time.monotonic() + seconds
    while True:
        for simpler in candidates(case):
            if attempts <= 0 or time.monotonic() > until:
                return case
            attempts -= 1
            if fails(simpler):
                case = simpler
                break
        else:
            return case


def candidates(case: Case) -> Iterator[Case]:
    """Cases that are smaller in one choice, the largest steps first."""
    for ranks in (1, 2, 3, case.ranks // 2, case.ranks - 1):
        if 0 < ranks < case.ranks:
            yield from _possible(case, ranks=ranks)
    for length in (4, 8, case.length // 2, case.length - case.length // 4, case.length - 1):
        if 1 < length < case.length:
            yield from _possible(case, length=length)
    for name, values in _SIMPLER.items():
        now = getattr(case, name)
        before = values[: values.index(now)] if now in values else values
        for value in before:
            yield from _possible(case, **{name: value})


def _possible(case: Case, **changes: Any) -> Iterator[Case]:
    changed = replace(case, **changes)
    if changed.possible():
        yield changed


_SHRUNK = 3  # failures of a group whose smallest case is searched for at length; the others are mostly alike
_AT_LENGTH, _BRIEFLY = 80, 12  # attempts


def listed(subject: Subject, only: Iterable[str] = (), cases: Sequence[str] = ()) -> list[Trial]:
    """The trials that were asked for: single ones by name, or those of some groups, or all."""
    return [trial_of(subject, text) for text in cases] or list(trials_of(subject, only))


def trials_of(subject: Subject, only: Iterable[str] = ()) -> Iterator[Trial]:
    """All trials, or those of some groups."""
    some = [name for name, check in CHECKS.items() if check.by_strategy or not subject.strategy]
    names = tuple(only) or tuple(some)
    for name in names:
        if name not in CHECKS:
            raise unknown_name("group of checks", name, CHECKS)
        if name not in some:
            raise InputError(f"the group {name!r} has no trials of a strategy", allowed=", ".join(some))
    for name in CHECKS:
        if name in names:
            yield from CHECKS[name].trials(subject)


def trial_of(subject: Subject, text: str) -> Trial:
    """The trial that a report calls so: ``group:case``, ``kernels:kernel:case`` or ``group:name``."""
    group, _, name = text.partition(":")
    if group not in CHECKS:
        raise unknown_name("group of checks", group, CHECKS)
    check = CHECKS[group]
    head, colon, spec = name.rpartition(":")
    kernels = [kernel.name for kernel in kernels_of(subject.backend)]
    is_case = "=" in spec or spec == "default"
    if group == "kernels" and subject.kernel != "auto" and name.partition(":")[0] in set(kernels) - {subject.kernel}:
        raise InputError(
            "the trial is of another kernel than the one to examine",
            got=f"{text}, and kernel {subject.kernel!r}",
            next_step="leave one of them out",
        )
    if check.of_case is not None and is_case and (head in kernels if group == "kernels" else not colon):
        return check.of_case(subject, Case.parse(spec), head)
    every = {trial.name: trial for trial in check.trials(replace(subject, effort="usual"))}
    if name not in every:
        raise unknown_name(f"trial of {group!r}", name, every)
    return every[name]


def attempt(trial: Trial, case: Case | None = None) -> Outcome:
    """Make it; whatever it raises is a failure that says so."""
    try:
        return trial.attempt(case or trial.case or Case())
    # A backend under examination may fail in any way, and the next trial should still be made.
    except Exception as error:  # noqa: BLE001
        return Outcome(wrong=raised(error))


def shrunk(trial: Trial, attempts: int = _AT_LENGTH) -> Case | None:
    """The smallest case found that fails as this one does; None for trials that are not cases."""
    if trial.case is None:
        return None
    return smallest(trial.case, lambda case: not attempt(trial, case).ok, attempts=attempts)


@dataclass
class Maker:
    """Makes trials one after another. `shrink`: the smallest case that fails is looked for."""

    subject: Subject
    shrink: bool = True
    _failures: dict[str, int] = field(default_factory=dict)

    def make(self, trial: Trial) -> tuple[Outcome, Result]:
        """One trial, timed; where it fails, its smallest case too."""
        started = time.monotonic()
        outcome = attempt(trial)
        seconds, least = time.monotonic() - started, None
        if not outcome.ok:
            count = self._failures[trial.check] = self._failures.get(trial.check, 0) + 1
            if self.shrink:
                least = shrunk(trial, _AT_LENGTH if count <= _SHRUNK else _BRIEFLY)
        return outcome, result_of(self.subject, trial, outcome, seconds, least)


def result_of(subject: Subject, trial: Trial, outcome: Outcome, seconds: float, least: Case | None = None) -> Result:
    """The report's result for an outcome."""
    text = trial.text
    if least is not None:
        text = f"{trial.check}:{trial.kernel}:{least.spec()}" if trial.kernel else f"{trial.check}:{least.spec()}"
    return Result(
        check=trial.check,
        name=trial.name,
        ok=outcome.ok,
        seconds=round(seconds, 4),
        errors={name: (error, allowed) for name, (error, allowed) in outcome.errors.items()},
        message=outcome.text(),
        skipped=outcome.skipped,
        smallest=text if not outcome.ok else "",
        command="" if outcome.ok else rerun(subject, text),
    )


def rerun(subject: Subject, text: str) -> str:
    """The command line that makes exactly one trial again."""
    words = ["burst-portable", "conform", "--backend", subject.backend.name]
    words += ["--kernel", subject.kernel] if subject.kernel != "auto" else []
    return shlex.join([*words, "--case", text])


_LAST_WORDS = 5.0  # seconds that a process gets to end
TRIAL_TIMEOUT = 900.0
"""Default seconds for a trial, including the process's start and everything compiled for it."""

Made = tuple[Outcome, Result]


def side_by_side(
    subject: Subject,
    only: Sequence[str],
    cases: Sequence[str],
    trials: Sequence[Trial],
    processes: int,
    *,
    shrink: bool,
    timeout: float = TRIAL_TIMEOUT,
) -> Generator[Made]:
    """Yield the result of each trial, in order; `only` and `cases` list the same trials in the other processes.

    A trial that takes more than `timeout` seconds fails, and its process is killed.
    """
    workers = [_Worker(subject, only, cases, shrink, timeout) for _ in range(min(processes, len(trials)))]
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

    def __init__(
        self, subject: Subject, only: Sequence[str], cases: Sequence[str], shrink: bool, timeout: float
    ) -> None:
        self._subject, self._arguments = subject, (carried(subject), only, cases, shrink)
        self._timeout = timeout
        self._process: multiprocessing.process.BaseProcess | None = None

    def make(self, number: int, trial: Trial) -> Made:
        """Ask for one trial and wait for its result."""
        if self._process is None:
            self._start()
        try:
            self._pipe.send(number)
            made = self._pipe.recv() if self._pipe.poll(self._timeout) else self._hangs(trial)
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
        outcome = Outcome(wrong=f"it had not ended after {self._timeout:g} s, and its process was ended")
        return outcome, result_of(self._subject, trial, outcome, self._timeout)

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


Progress = Callable[[int, int, Trial, Outcome | None], None]
"""Called before a trial (with None) and after it: how many are done, how many there are."""


def check_backend(
    backend: str | Backend,
    *,
    ranks: int = 8,
    only: Iterable[str] = (),
    cases: Sequence[str] = (),
    effort: str = "usual",
    kernel: str = "auto",
    tier: str | None = None,
    fail_fast: bool = False,
    wrap: Wrap = as_it_is,
    timeout: float = 60.0,
    processes: int = 1,
    progress: Progress | None = None,
    trial_timeout: float = TRIAL_TIMEOUT,
    strategy: str = "",
) -> Report:
    """Try everything that a backend must fulfil, and say how it went.

    Args:
        backend: its name, or the backend itself.
        ranks: the most ranks that a case may have; they are threads, and processes in the group "group".
        only: groups of checks (see `runtime.validation.CHECKS`); all unless given.
        cases: single trials, as a report names them (``attention:mask=full,ranks=3``), instead of whole groups.
        effort: "quick" (seconds on a CPU, minutes where kernels are compiled first), "usual" (every pair of choices),
            "full" (products: an hour).
        kernel: the one kernel to examine; "auto" examines all of them.
        tier: what kind of evidence this is; what the backend's probe says, or "device", unless given.
        fail_fast: stop at the first failure, as it is: no smaller case is looked for.
        wrap: put around the transport of ranks that are threads; for tests of this suite.
        timeout: seconds until a rank that waits in vain gives up.
        processes: how many make trials side by side, all on the same devices; 1 is this process alone. They are
            spawned: a script that asks for several starts from ``if __name__ == "__main__":``.
        progress: told about every trial, in order.
        trial_timeout: Seconds for one trial, if trials run in other processes.
        strategy: The strategy whose trials are made, by name. Default: all groups, with our own strategies.

    Raises:
        InputError: a name that is none, or numbers that are out of range.
        BackendUnavailableError: the backend cannot run here.
    """
    found = load(backend) if isinstance(backend, str) else backend
    subject = Subject(found, ranks, effort, kernel, wrap, timeout, strategy)
    facts = _able(found)
    _check_arguments(subject, tier, processes)
    only, cases = tuple(only), tuple(cases)
    started = time.monotonic()
    with examining():
        results = tuple(_made(subject, only, cases, processes, fail_fast, progress, trial_timeout))
    return Report(
        backend=found.name,
        tier=tier or str(facts.get("tier", "device")),
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        seconds=time.monotonic() - started,
        ranks=ranks,
        effort=effort,
        kernel=kernel,
        only=only or cases or ((f"strategy {strategy}",) if strategy else ()),
        kernels=tuple(k.name for k in kernels_of(found)),
        device=_device(found, facts),
        versions=_versions(),
        results=results,
    )


def _made(
    subject: Subject,
    only: Sequence[str],
    cases: Sequence[str],
    processes: int,
    fail_fast: bool,
    told: Progress | None,
    timeout: float,
) -> Iterator[Result]:
    trials = listed(subject, only, cases)
    if not trials and subject.strategy:
        raise _serves_nothing(subject)
    if processes == 1:
        maker = Maker(subject, shrink=not fail_fast)
        every: Generator[Made] = (maker.make(trial) for trial in trials)
    else:
        every = side_by_side(subject, only, cases, trials, processes, shrink=not fail_fast, timeout=timeout)
    with closing(every):
        for number, trial in enumerate(trials):
            if told:
                told(number, len(trials), trial, None)
            outcome, result = next(every)
            if told:
                told(number + 1, len(trials), trial, outcome)
            yield result
            if fail_fast and not outcome.ok:
                return


def _serves_nothing(subject: Subject) -> UnsupportedError:
    """Return the error for a strategy that can serve none of the cases, with the reason for the first one."""
    reasons = []
    for label in subject.strategies:
        case = Case(strategy=label)
        try:
            case.make_strategy().check(case.make_call())
        except (InputError, UnsupportedError) as error:
            reasons.append(f"{label}: {error}")
    what = f"the strategy {subject.strategy!r} serves none of these cases"
    return UnsupportedError(what, got="; ".join(reasons[:1]), next_step="try more ranks, or other groups of checks")


def _check_arguments(subject: Subject, tier: str | None, processes: int) -> None:
    if isinstance(processes, bool) or not isinstance(processes, int) or not 1 <= processes <= 256:
        raise InputError("processes must be a number of them", got=processes, allowed="1 to 256")
    if isinstance(subject.ranks, bool) or not isinstance(subject.ranks, int) or not 1 <= subject.ranks <= 64:
        raise InputError("ranks must be a number of threads", got=subject.ranks, allowed="1 to 64")
    if subject.effort not in EFFORTS:
        raise unknown_name("effort", subject.effort, EFFORTS)
    if tier is not None and tier not in TIERS:
        raise unknown_name("tier of evidence", tier, TIERS)
    if subject.strategy:
        strategy_trials(subject.strategy)  # raises for a name that is none
    if subject.kernel != "auto":  # a name that is none is refused
        names = [k.name for k in kernels_of(subject.backend)]
        if subject.kernel not in names:
            choose_kernel(subject.backend, Case().make_call(subject.device.type), subject.kernel)


def _able(backend: Backend) -> dict[str, object]:
    probe = probed(backend)
    if not probe.ok:
        raise BackendUnavailableError(
            f"the backend {backend.name!r} cannot run here", got=probe.reason, next_step="burst-portable doctor"
        )
    kind = backend.capabilities.device_type
    try:
        torch.device(kind)
    except RuntimeError as error:
        what = f"the probe of the backend {backend.name!r} says that it can run here, and torch knows no such device"
        raise BackendUnavailableError(
            what, got=repr(kind), next_step="the vendor's package must have registered it by then"
        ) from error
    if (told := probe.facts.get("tier", "device")) not in TIERS:
        raise unknown_name(f"tier of evidence in the probe of the backend {backend.name!r}", told, TIERS)
    return dict(probe.facts)


def _device(backend: Backend, facts: dict[str, object]) -> dict[str, str]:
    told = {name: str(value) for name, value in sorted(facts.items())}
    home = known().get(backend.name, type(backend).__module__)
    return {"type": backend.capabilities.device_type, "from": home, **told}


def _versions() -> dict[str, str]:
    return {
        "burst_portable": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
    }
