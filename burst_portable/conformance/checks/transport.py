"""Check transports: between ranks as threads, and a backend's own between processes with a device each."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from burst_portable.backends.base import Backend
from burst_portable.conformance.cases import Case
from burst_portable.conformance.checks.attention import case_trial, case_trials, judged
from burst_portable.conformance.exchanges import JOBS
from burst_portable.conformance.oracle import make_inputs
from burst_portable.conformance.processes import devices, exchange, exchange_in_subgroup, shards
from burst_portable.conformance.running import together
from burst_portable.conformance.trial import Check, Outcome, Subject, Trial, plain


def _thread_trials(subject: Subject) -> Iterator[Trial]:
    """Yield every job, on few ranks and on many."""
    for ranks in (2, 3) if subject.effort == "quick" else (2, 3, 5, 8):
        if ranks <= subject.ranks:
            yield from (plain("transport", f"{job}-{ranks}ranks", _run_job, subject, job, ranks) for job in JOBS)


def _run_job(subject: Subject, job: str, ranks: int) -> Outcome:
    said = subject.threads(ranks, lambda transport: JOBS[job](transport, subject.device))
    return Outcome(wrong="; ".join(f"rank {rank}: {wrong}" for rank, wrong in enumerate(said) if wrong))


TRANSPORT = Check("transport", "messages and collectives between ranks as threads", _thread_trials)


_GROUP_CASES = (
    Case(mask="custom", layout="striped", strategy="burst", ranks=2, sinks=True),
    Case(mask="documents", layout="document_zigzag", strategy="ring+fetch", ranks=3, dtype=torch.bfloat16),
    Case(mask="causal", strategy="ulysses", ranks=4, heads="mha"),
    Case(mask="sink_window", strategy="double_ring", ranks=4),
    Case(mask="causal", strategy="usp", ranks=4),
)


def _group_trials(subject: Subject) -> Iterator[Trial]:
    """Yield messages and collectives, and a few attentions. A process takes seconds to start: few of each."""
    counts, cases = ((2,), _GROUP_CASES[:1]) if subject.effort == "quick" else ((2, 3), _GROUP_CASES)
    yield from (plain("group", f"messages-{n}ranks", _messages, subject, n) for n in counts if n <= subject.ranks)
    if subject.effort != "quick" and subject.ranks >= _WORLD:
        yield plain("group", f"messages-{_WORLD - 1}ranks-of-{_WORLD}", _messages_in_subgroup, subject)
    yield from case_trials("group", subject, cases, _attend)


_WORLD = 3
"""Processes of the trial in a subgroup, which leaves out the first: there, no rank has its number in the group."""


def _messages(subject: Subject, ranks: int) -> Outcome:
    reason = _impossible(subject, ranks)
    return Outcome(skipped=reason) if reason else Outcome(wrong=exchange(subject, ranks))


def _messages_in_subgroup(subject: Subject) -> Outcome:
    reason = _impossible(subject, _WORLD)
    return Outcome(skipped=reason) if reason else Outcome(wrong=exchange_in_subgroup(subject, _WORLD))


def _attend(subject: Subject, case: Case) -> Outcome:
    if reason := _impossible(subject, case.ranks):
        return Outcome(skipped=reason)
    return judged(case, make_inputs(case), together(shards(subject, case), case.make_layout()))


def _impossible(subject: Subject, ranks: int) -> str:
    """Return why this many processes cannot be connected on this machine; "" if they can."""
    if type(subject.backend).transport is Backend.transport:
        return f"the backend {subject.backend.name!r} has no transport, so it serves one rank only"
    found = devices(subject.backend)
    return f"{ranks} ranks need {ranks} devices, and there is {found}" if found is not None and found < ranks else ""


GROUP = Check(
    "group",
    "the backend's own transport, between processes",
    _group_trials,
    lambda subject, case, kernel: case_trial("group", subject, case, _attend),
)
