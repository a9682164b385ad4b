"""`check_backend`: try everything that a backend must fulfil, and report on it."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing
from datetime import UTC, datetime

import torch

from burst_portable import __version__
from burst_portable.backends.base import Backend
from burst_portable.backends.registry import choose_kernel, known, load, probed
from burst_portable.conformance.cases import Case
from burst_portable.conformance.making import Maker, listed
from burst_portable.conformance.poison import examining
from burst_portable.conformance.report import TIERS, Report, Result
from burst_portable.conformance.running import kernel_problem
from burst_portable.conformance.side_by_side import Made, side_by_side
from burst_portable.conformance.subject import EFFORTS, Subject, Wrap, as_it_is
from burst_portable.conformance.trial import Outcome, Trial
from burst_portable.errors import BackendUnavailableError, InputError, explain, unknown_name

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
    deadline: float = 60.0,
    processes: int = 1,
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
        processes: how many make trials side by side, all on the same devices; 1 is this process alone. They are
            spawned: a script that asks for several starts from ``if __name__ == "__main__":``.
        progress: told about every trial, in order.

    Raises:
        InputError: a name that is none, or numbers that are out of range.
        BackendUnavailableError: the backend cannot run here.
    """
    found = load(backend) if isinstance(backend, str) else backend
    subject = Subject(found, ranks, effort, kernel, wrap, deadline)
    facts = _able(found)
    _check_arguments(subject, tier, processes)
    only, cases = tuple(only), tuple(cases)
    started = time.monotonic()
    with examining():
        results = tuple(_made(subject, only, cases, processes, fail_fast, progress))
    return Report(
        backend=found.name,
        tier=tier or str(facts.get("tier", "device")),
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        seconds=time.monotonic() - started,
        ranks=ranks,
        effort=effort,
        kernel=kernel,
        only=only or cases,
        kernels=tuple(k.name for k in found.kernels()),
        device=_device(found, facts),
        versions=_versions(),
        results=results,
    )


def _made(
    subject: Subject, only: Sequence[str], cases: Sequence[str], processes: int, fail_fast: bool, told: Progress | None
) -> Iterator[Result]:
    trials = listed(subject, only, cases)
    if processes == 1:
        maker = Maker(subject, shrink=not fail_fast)
        every: Generator[Made] = (maker.make(trial) for trial in trials)
    else:
        every = side_by_side(subject, only, cases, trials, processes, shrink=not fail_fast)
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


def _check_arguments(subject: Subject, tier: str | None, processes: int) -> None:
    if isinstance(processes, bool) or not isinstance(processes, int) or not 1 <= processes <= 256:
        raise InputError(explain("processes must be a number of them", got=processes, allowed="1 to 256"))
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
    probe = probed(backend)
    if not probe.ok:
        raise BackendUnavailableError(
            explain(
                f"the backend {backend.name!r} cannot run here", got=probe.reason, next_step="burst-portable doctor"
            )
        )
    kind = backend.capabilities.device_type
    try:
        torch.device(kind)
    except RuntimeError as error:
        what = f"the probe of the backend {backend.name!r} says that it can run here, and torch knows no such device"
        raise BackendUnavailableError(
            explain(what, got=repr(kind), next_step="the vendor's package must have registered it by then")
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
