"""Test transports: between ranks as threads, and the backend's own between processes with one device each."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import torch

from burst_portable.conformance.base import (
    BackendUnderTest,
    Check,
    Outcome,
    TestCase,
    make_plain_test,
    record_kernel,
)
from burst_portable.conformance.cases import Case
from burst_portable.conformance.checks.comparison import compare, make_case_test, make_case_tests
from burst_portable.conformance.checks.kernel_contract import fitted
from burst_portable.conformance.exchanges import JOBS
from burst_portable.conformance.oracle import make_inputs
from burst_portable.conformance.processes import run_exchanges, run_on_processes, skip_reason
from burst_portable.conformance.running import gather_shards, plan_of


def _thread_tests(target: BackendUnderTest) -> Iterator[TestCase]:
    """Yield every job, on few and on many ranks."""
    for ranks, job in product((2, 3) if target.coverage == "quick" else (2, 3, 5, 8), JOBS):
        if ranks <= target.ranks:
            yield make_plain_test("transport", f"{job}-{ranks}ranks", _run_job, target, job, ranks)


def _run_job(target: BackendUnderTest, job: str, ranks: int) -> Outcome:
    reports = target.threads(ranks, lambda transport: JOBS[job](transport, target.device))
    return Outcome(wrong="; ".join(f"rank {rank}: {wrong}" for rank, wrong in enumerate(reports) if wrong))


TRANSPORT = Check(
    "transport", "messages and collectives of this library's own threads; not the backend's transport", _thread_tests
)


_GROUP_CASES = (
    Case(mask="custom", layout="striped", strategy="burst", ranks=2, sinks=True),
    Case(mask="documents", layout="document_zigzag", strategy="ring(transfer=direct)", ranks=3, dtype=torch.bfloat16),
    Case(mask="causal", strategy="ulysses", ranks=4, heads="mha"),
    Case(mask="sink_window", strategy="double_ring", ranks=4),
    Case(mask="causal", strategy="usp", ranks=4),
)


def _group_tests(target: BackendUnderTest) -> Iterator[TestCase]:
    """Yield messages and collectives, and a few attentions with the preferred kernel.

    There are few of each, since a process takes seconds to start.
    """
    counts: tuple[int, ...] = (2, 3)
    cases: tuple[Case, ...] = _GROUP_CASES
    if target.coverage == "quick":  # two ranks cannot show that messages of two peers are exchanged
        counts, cases = ((2,) if target.ranks < 3 or skip_reason(target, 3) else (3,)), _GROUP_CASES[:1]
    # With the preferred kernel, which may support 16 bits only. Its heads may be too few for the ranks.
    device, kernels = target.device.type, target.kernels
    fits = (fitted(case, kernels[0], device) if kernels else case for case in cases)
    cases = tuple(fit if fit.possible() else case for case, fit in zip(cases, fits, strict=True))
    for ranks in counts:
        if ranks <= target.ranks:
            yield make_plain_test("group", f"messages-{ranks}ranks", _messages, target, ranks)
    # A subgroup that excludes rank 0: no rank of the group has its global number.
    if target.coverage != "quick" and target.ranks >= 3:
        yield make_plain_test("group", "messages-2ranks-of-3", _messages, target, 3, True)
    yield from make_case_tests("group", target, cases, _attend)


def _messages(target: BackendUnderTest, ranks: int, in_subgroup: bool = False) -> Outcome:
    if reason := skip_reason(target, ranks):
        return Outcome(skipped=reason)
    return Outcome(wrong=run_exchanges(target, ranks, in_subgroup=in_subgroup))


def _attend(target: BackendUnderTest, case: Case) -> Outcome:
    if reason := skip_reason(target, case.ranks):
        return Outcome(skipped=reason)
    shards = run_on_processes(target, case)
    record_kernel(target.choose(plan_of(case, target.device.type).forward.call).name)
    return compare(case, make_inputs(case), gather_shards(shards, case.make_layout()))


GROUP = Check(
    "group",
    "the backend's own transport, between processes",
    _group_tests,
    lambda target, case, kernel: make_case_test("group", target, case, _attend),
)
