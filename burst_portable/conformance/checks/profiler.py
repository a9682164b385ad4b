"""Test the profiler on this backend's clock: the partition of time is correct, and recording changes no result."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from typing import Any

from burst_portable.conformance import oracle
from burst_portable.conformance.base import BackendUnderTest, Check, Outcome, TestCase, make_plain_test, skippable
from burst_portable.conformance.cases import Case
from burst_portable.conformance.oracle import make_inputs
from burst_portable.conformance.running import plan_of, run_case
from burst_portable.kernels.base import WrappedKernel
from burst_portable.numerics import State
from burst_portable.planning.plans import PASSES
from burst_portable.profiling.intervals import PARTS
from burst_portable.profiling.session import Session, profile
from burst_portable.runtime.prepared_call import call_wrapper

NAME = "profiler"
_PART = {"compute": "compute", "copy": "exposed_copy"}  # of events that are not communication
DELAY = 0.02
"""Seconds by which a kernel is delayed in the test of the clock."""
_MARGIN = 5_000_000  # nanoseconds by which a device's clock may differ from the host's
_CASES = (
    Case(mask="custom", ranks=3, strategy="burst", layout="striped"),
    Case(mask="causal", ranks=4, strategy="double_ring"),
    Case(mask="documents", ranks=3, strategy="ring(transfer=direct)"),
    Case(mask="causal", ranks=2, strategy="ulysses", heads="mqa"),
    Case(mask="causal", ranks=4, strategy="usp"),
)

Facts = dict[str, Any]


def list_tests(target: BackendUnderTest) -> Iterator[TestCase]:
    """Yield the partition of each case, and the clock."""
    for case in _CASES[:1] if target.coverage == "quick" else _CASES:
        if case.ranks <= target.ranks:
            yield make_plain_test(NAME, f"partition-{case}", _partition, target, case)
    yield make_plain_test(NAME, "clock", _clock, target)


@skippable
def _partition(target: BackendUnderTest, case: Case) -> Outcome:
    x = make_inputs(case)
    unrecorded = run_case(target, case, x)
    with profile() as session:
        recorded = run_case(target, case, x)
    if name := unrecorded.differs(recorded):
        return Outcome(wrong=f"{name} has other bits while it is recorded")
    data = _report(session)
    return Outcome(wrong=_check_sums(data) or compare_with_events(data) or _check_complete(data, case))


def _report(session: Session) -> Facts:
    report = session.report()
    assert report is not None, "all ranks are threads of this process"
    return report.data


def _check_sums(data: Facts) -> str:
    """Check that the four parts add up exactly, in a rank's window and in its ring steps, layers and train steps."""
    pieces = [(kind, piece["ranks"]) for kind in ("ring_steps", "layers", "train_steps") for piece in data[kind]]
    for kind, ranks in [*pieces, ("windows", data["ranks"])]:
        for rank in ranks:
            parts = [rank[f"{part}_ns"] for part in PARTS]
            if rank["span_ns"] != sum(parts):
                return f"the parts of {kind} do not add up on rank {rank['rank']}"
            if min(parts) < 0:
                return f"a part of {kind} is below 0 on rank {rank['rank']}"
    return ""


def compare_with_events(data: Facts) -> str:
    """Compare the partition of each rank with a sweep over its events. Return the difference, or ""."""
    kinds = data["events"]["kinds"]
    for rank, events in zip(data["ranks"], data["events"]["ranks"], strict=True):
        rows = zip(events["kind"], events["start_ns"], events["duration_ns"], strict=True)
        # An event without duration, such as a wait for data that is already there, extends no window.
        spans = [(_PART.get(kinds[kind], "exposed_comm"), start, start + took) for kind, start, took in rows if took]
        for part, nanoseconds in _sweep(spans).items():
            reported = rank[f"{part}_ns"]
            if reported != nanoseconds:
                return f"{part} of rank {rank['rank']} is {reported} ns, but its events give {nanoseconds}"
    return ""


def _sweep(spans: list[tuple[str, int, int]]) -> dict[str, int]:
    """Return the partition of (part, start, end): each interval counts for the first of `PARTS` that is running."""
    edges = sorted(edge for part, start, end in spans for edge in ((start, 1, part), (end, -1, part)))
    found, running = dict.fromkeys(PARTS, 0), dict.fromkeys(PARTS, 0)
    for (start, change, part), following in pairwise(edges):
        running[part] += change
        found[next(name for name in PARTS if running[name] or name == "idle")] += following[0] - start
    return found | {"span": sum(found.values())}


def _check_complete(data: Facts, case: Case) -> str:
    """Check that the report contains every pair of the mask once, and every kernel of the plan."""
    plan = plan_of(case)
    visible = int(oracle.dense_mask(case.make_mask(), case.length).sum())
    repeats = plan.head_parallel_size * plan.rounds  # each group of heads computes every pair
    for backward, name in enumerate(PASSES):
        pieces = [step for step in data["ring_steps"] if step["backward"] == backward]
        pairs = sum(cell["pairs"] for step in pieces for cell in step["ranks"])
        if pairs != visible * repeats:
            return f"{name}: {pairs} pairs are in the report, but the mask has {visible * repeats}"
        kernels = [rank["passes"][name]["kernels"] for rank in data["ranks"]]
        steps = [plan.steps(name, rank) for rank in range(case.ranks)]
        planned = [plan.rounds * sum(step.compute is not None for step in one) for one in steps]
        if kernels != planned:
            return f"{name}: {kernels} kernels per rank are in the report, but the plan has {planned}"
    return ""


# ------------------------------------------------------------------------------------------------------- the clock


class _Delayed(WrappedKernel):
    """A kernel whose forward pass takes `DELAY` longer."""

    def attend(self, *args: Any, **options: Any) -> State:
        time.sleep(DELAY)
        return self.wrapped.attend(*args, **options)

    def forward_single_call(self, *args: Any, **options: Any) -> State:
        time.sleep(DELAY)
        return self.wrapped.forward_single_call(*args, **options)


@contextmanager
def _delay_kernels() -> Iterator[None]:
    """Delay the kernels that a session records."""
    record = call_wrapper.get()
    assert record is not None, "inside a session"
    token = call_wrapper.set(lambda prepared, mesh: record(replace(prepared, kernel=_Delayed(prepared.kernel)), mesh))
    try:
        yield
    finally:
        call_wrapper.reset(token)


def _clock(target: BackendUnderTest) -> Outcome:
    """Check that a delay of known length appears in the report, at its time on the host's clock."""
    case = Case(ranks=1)
    with profile() as session, _delay_kernels():
        began = time.perf_counter_ns()
        run_case(target, case, make_inputs(case))
        ended = time.perf_counter_ns()
    (rank,) = _report(session)["ranks"]
    first, last = rank["window_ns"]
    computed = rank["passes"]["forward"]["compute_ns"]
    if not DELAY * 1e9 - _MARGIN <= computed <= ended - began:
        return Outcome(wrong=f"a kernel of at least {DELAY * 1e3:g} ms is reported as {computed / 1e6:.3f} ms")
    if first < began - _MARGIN or last > ended + _MARGIN:
        return Outcome(wrong="the reported times are outside of the time in which it ran")
    return Outcome()


CHECK = Check(
    NAME, "the profiler's partition adds up and is complete, on this device's clock; results keep every bit", list_tests
)
