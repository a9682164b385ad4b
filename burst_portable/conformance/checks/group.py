"""The backend's own transport: ranks as processes that share a process group, each with a device of its own."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from burst_portable.conformance.cases import Case
from burst_portable.conformance.checks.attending import case_trial, case_trials, judged
from burst_portable.conformance.oracle import make_inputs
from burst_portable.conformance.processes import devices, exchange, shards
from burst_portable.conformance.running import together
from burst_portable.conformance.trial import Check, Outcome, Subject, Trial, plain

NAME = "group"
_CASES = (
    Case(mask="custom", layout="striped", strategy="burst", ranks=2, sinks=True),
    Case(mask="documents", layout="document_zigzag", strategy="ring+fetch", ranks=3, dtype=torch.bfloat16),
    Case(mask="causal", strategy="ulysses", ranks=4, heads="mha"),
    Case(mask="sink_window", strategy="double_ring", ranks=4),
    Case(mask="causal", strategy="usp", ranks=4),
)


def trials(subject: Subject) -> Iterator[Trial]:
    """Messages and collectives; a few attentions. A process takes seconds to start: few of each."""
    counts, cases = ((2,), _CASES[:1]) if subject.effort == "quick" else ((2, 3), _CASES)
    yield from (plain(NAME, f"messages-{n}ranks", _messages, subject, n) for n in counts if n <= subject.ranks)
    yield from case_trials(NAME, subject, cases, _attempt)


def of_case(subject: Subject, case: Case, kernel: str) -> Trial:
    """Any case."""
    return case_trial(NAME, subject, case, _attempt)


def _messages(subject: Subject, ranks: int) -> Outcome:
    too_few = _too_few(subject, ranks)
    return Outcome(skipped=too_few) if too_few else Outcome(wrong=exchange(subject, ranks))


def _attempt(subject: Subject, case: Case) -> Outcome:
    if too_few := _too_few(subject, case.ranks):
        return Outcome(skipped=too_few)
    return judged(case, make_inputs(case), together(shards(subject, case), case.make_layout()))


def _too_few(subject: Subject, ranks: int) -> str:
    found = devices(subject.backend)
    return f"{ranks} ranks need {ranks} devices, and there is {found}" if found is not None and found < ranks else ""


CHECK = Check(NAME, "the backend's own transport, between processes", trials, of_case)
