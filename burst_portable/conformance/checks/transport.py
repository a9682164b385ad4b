"""Point to point and collectives between ranks as threads: order, sizes, buffers of their own."""

from __future__ import annotations

from collections.abc import Iterator

from burst_portable.conformance.exchanges import JOBS
from burst_portable.conformance.trial import Check, Outcome, Subject, Trial, plain

NAME = "transport"


def trials(subject: Subject) -> Iterator[Trial]:
    """Every job, on few ranks and on many."""
    for ranks in (2, 3) if subject.effort == "quick" else (2, 3, 5, 8):
        if ranks <= subject.ranks:
            yield from (plain(NAME, f"{job}-{ranks}ranks", _attempt, subject, job, ranks) for job in JOBS)


def _attempt(subject: Subject, job: str, ranks: int) -> Outcome:
    said = subject.threads(ranks, lambda transport: JOBS[job](transport, subject.device))
    return Outcome(wrong="; ".join(f"rank {rank}: {wrong}" for rank, wrong in enumerate(said) if wrong))


CHECK = Check(NAME, "messages and collectives between ranks as threads", trials)
