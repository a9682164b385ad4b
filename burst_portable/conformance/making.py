"""Making trials: which there are, one attempt, and what is written down of it."""

from __future__ import annotations

import shlex
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from burst_portable.conformance.cases import Case
from burst_portable.conformance.checks import CHECKS
from burst_portable.conformance.report import Result
from burst_portable.conformance.shrink import smallest
from burst_portable.conformance.subject import Subject
from burst_portable.conformance.trial import Outcome, Trial, raised
from burst_portable.errors import InputError, explain, unknown_name

_SHRUNK = 3  # failures of a group whose smallest case is searched for at length; the others are mostly alike
_AT_LENGTH, _BRIEFLY = 80, 12  # attempts


def listed(subject: Subject, only: Iterable[str] = (), cases: Sequence[str] = ()) -> list[Trial]:
    """The trials that were asked for: single ones by name, or those of some groups, or all."""
    return [trial_of(subject, text) for text in cases] or list(trials_of(subject, only))


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
    if group == "kernels" and subject.kernel != "auto" and name.partition(":")[0] in set(kernels) - {subject.kernel}:
        raise InputError(
            explain(
                "the trial is of another kernel than the one to examine",
                got=f"{text}, and kernel {subject.kernel!r}",
                next_step="leave one of them out",
            )
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
