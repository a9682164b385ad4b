"""`check_backend`: everything that a backend must fulfil, tried, with a report."""

from __future__ import annotations

import platform
import shlex
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from datetime import UTC, datetime

import torch

from burst_portable import __version__
from burst_portable.backends.base import Backend
from burst_portable.backends.registry import choose_kernel, known, load
from burst_portable.conformance.cases import Case
from burst_portable.conformance.checks import CHECKS
from burst_portable.conformance.poison import examining
from burst_portable.conformance.report import TIERS, Report, Result
from burst_portable.conformance.running import kernel_problem
from burst_portable.conformance.shrink import smallest
from burst_portable.conformance.subject import EFFORTS, Subject, Wrap, as_it_is
from burst_portable.conformance.trial import Outcome, Trial
from burst_portable.errors import BackendUnavailableError, InputError, explain, unknown_name

Progress = Callable[[int, int, Trial, Outcome | None], None]
"""Called before a trial (with None) and after it: how many are done, how many there are."""

_SHRUNK = 3  # failures of a group whose smallest case is looked for at length; the rest mostly say the same
_AT_LENGTH, _BRIEFLY = 80, 12  # attempts


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
    deadline: float = 60.0,
    progress: Progress | None = None,
) -> Report:
    """Try everything that a backend must fulfil, and say how it went.

    Args:
        backend: its name, or the backend itself.
        ranks: the most ranks that a case may have; they are threads, and processes in the group "group".
        only: groups of checks (see `checks.CHECKS`); all unless given.
        cases: single trials, as a report names them (``attention:mask=full,ranks=3``), instead of whole groups.
        effort: "quick" (seconds on a CPU, minutes where kernels are compiled first), "usual" (every pair of choices),
            "full" (products: an hour).
        kernel: the one kernel to examine; "auto" examines all of them.
        tier: what kind of evidence this is; what the backend's probe says, or "device", unless given.
        fail_fast: stop at the first failure, as it is: no smaller case is looked for.
        wrap: put around the transport of ranks that are threads; for tests of this suite.
        deadline: seconds until a rank that waits in vain gives up.
        progress: told about every trial.

    Raises:
        InputError: a name that is none, or numbers that are out of range.
        BackendUnavailableError: the backend cannot run here.
    """
    found = load(backend) if isinstance(backend, str) else backend
    subject = Subject(found, ranks, effort, kernel, wrap, deadline)
    _check_arguments(subject, tier)
    facts = _able(found)
    started = time.monotonic()
    with examining():
        trials = [trial_of(subject, text) for text in cases] or list(trials_of(subject, only))
        results = list(_tried(subject, trials, fail_fast, progress))
    return Report(
        backend=found.name,
        tier=tier or str(facts.get("tier", "device")),
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        seconds=time.monotonic() - started,
        ranks=ranks,
        effort=effort,
        kernel=kernel,
        only=tuple(only) or tuple(cases),
        kernels=tuple(k.name for k in found.kernels()),
        device=_device(found, facts),
        versions=_versions(),
        results=tuple(results),
    )


def trials_of(subject: Subject, only: Iterable[str] = ()) -> Iterator[Trial]:
    """All trials, or those of some groups."""
    names = tuple(only) or tuple(CHECKS)
    for name in names:
        if name not in CHECKS:
            raise unknown_name("group of checks", name, CHECKS)
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
    kernels = [kernel.name for kernel in subject.backend.kernels()]
    is_case = "=" in spec or spec == "default"
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
        return Outcome(wrong=f"{type(error).__name__}: {' '.join(str(error).split())[:400]}")


def shrunk(trial: Trial, attempts: int = _AT_LENGTH) -> Case | None:
    """The smallest case found that fails as this one does; None for trials that are no case."""
    if trial.case is None:
        return None
    return smallest(trial.case, lambda case: not attempt(trial, case).ok, attempts=attempts)


def _tried(subject: Subject, trials: Sequence[Trial], fail_fast: bool, progress: Progress | None) -> Iterator[Result]:
    failures: dict[str, int] = {}
    for number, trial in enumerate(trials):
        if progress:
            progress(number, len(trials), trial, None)
        started = time.monotonic()
        outcome = attempt(trial)
        seconds = time.monotonic() - started
        least = None
        if not outcome.ok:
            failures[trial.check] = failures.get(trial.check, 0) + 1
            if not fail_fast:
                least = shrunk(trial, _AT_LENGTH if failures[trial.check] <= _SHRUNK else _BRIEFLY)
        if progress:
            progress(number + 1, len(trials), trial, outcome)
        yield _result(subject, trial, outcome, seconds, least)
        if fail_fast and not outcome.ok:
            return


def _result(subject: Subject, trial: Trial, outcome: Outcome, seconds: float, least: Case | None) -> Result:
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


def _check_arguments(subject: Subject, tier: str | None) -> None:
    if isinstance(subject.ranks, bool) or not isinstance(subject.ranks, int) or not 1 <= subject.ranks <= 64:
        raise InputError(explain("ranks must be a number of threads", got=subject.ranks, allowed="1 to 64"))
    if subject.effort not in EFFORTS:
        raise unknown_name("effort", subject.effort, EFFORTS)
    if tier is not None and tier not in TIERS:
        raise unknown_name("tier of evidence", tier, TIERS)
    if subject.kernel != "auto":  # a name that is none is refused
        names = [k.name for k in subject.backend.kernels()]
        if subject.kernel not in names:
            choose_kernel(subject.backend, kernel_problem(Case(), subject.device.type), subject.kernel)


def _able(backend: Backend) -> dict[str, object]:
    probe = backend.probe()
    if not probe.ok:
        raise BackendUnavailableError(
            explain(
                f"the backend {backend.name!r} cannot run here", got=probe.reason, next_step="burst-portable doctor"
            )
        )
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
