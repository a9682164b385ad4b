"""The profiler on this backend's clock: its partition adds up and is right, nothing is missing, no bit changes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from typing import Any

from burst_portable.conformance import oracle
from burst_portable.conformance.cases import Case
from burst_portable.conformance.oracle import make_inputs
from burst_portable.conformance.running import plan_of, run_case
from burst_portable.conformance.trial import Check, Outcome, Subject, Trial, plain
from burst_portable.errors import UnsupportedError
from burst_portable.kernels.base import WrappedKernel
from burst_portable.numerics import State
from burst_portable.planning.plans import PASSES, PassName, Plan
from burst_portable.profiling.intervals import PARTS
from burst_portable.profiling.session import Session, profile
from burst_portable.runtime.prepared_call import installed

NAME = "profiler"
_PART = {"compute": "compute", "copy": "exposed_copy"}  # of events that are not communication
HELD = 0.02
"""Seconds for which a kernel is held in the trial of the clock."""
_MARGIN = 5_000_000  # nanoseconds by which a device's clock may be off from the host's
_CASES = (
    Case(mask="custom", ranks=3, strategy="burst", layout="striped"),
    Case(mask="causal", ranks=4, strategy="double_ring"),
    Case(mask="documents", ranks=3, strategy="ring+fetch"),
    Case(mask="causal", ranks=2, strategy="ulysses", heads="mqa"),
    Case(mask="causal", ranks=4, strategy="usp"),
)

Facts = dict[str, Any]


def trials(subject: Subject) -> Iterator[Trial]:
    """The partition of each case, and the clock."""
    for case in _CASES[:1] if subject.effort == "quick" else _CASES:
        if case.ranks <= subject.ranks:
            yield plain(NAME, f"partition-{case}", _partition, subject, case)
    yield plain(NAME, "clock", _clock, subject)


def _partition(subject: Subject, case: Case) -> Outcome:
    x = make_inputs(case)
    try:
        plainly = run_case(subject, case, x)
        with profile() as session:
            recorded = run_case(subject, case, x)
    except UnsupportedError as refusal:
        return Outcome(skipped=str(refusal))
    if name := plainly.differs(recorded):
        return Outcome(wrong=f"{name} has other bits while it is recorded")
    told = _told(session)
    return Outcome(wrong=_sums(told) or counted(told) or _complete(told, case))


def _told(session: Session) -> Facts:
    report = session.report()
    assert report is not None, "ranks are threads: all were recorded here"
    data: Facts = report.data
    return data


def _sums(told: Facts) -> str:
    """Whether the four parts add up, in whole nanoseconds: a rank's window, and every piece that it is cut into."""
    for kind in ("steps", "layers", "iterations"):
        for piece in told[kind]:
            for cell in piece["ranks"]:
                if cell["span"] != sum(cell[part] for part in PARTS):
                    return f"the parts of {kind} do not add up on rank {cell['rank']}"
    for rank in told["ranks"]:
        if rank["span"] != sum(rank[part] for part in PARTS):
            return f"the parts of rank {rank['rank']} do not add up"
        if min(rank[part] for part in PARTS) < 0:
            return f"a part of rank {rank['rank']} is below 0"
    return ""


def counted(told: Facts) -> str:
    """What differs between a rank's partition and a count of its events from boundary to boundary; "" if nothing."""
    kinds = told["events"]["kinds"]
    for rank, events in zip(told["ranks"], told["events"]["ranks"], strict=True):
        rows = zip(events["kind"], events["start"], events["duration"], strict=True)
        # An event that took no time, such as a wait for what was there, makes no window longer.
        spans = [(_PART.get(kinds[kind], "exposed_comm"), start, start + took) for kind, start, took in rows if took]
        for part, nanoseconds in _sweep(spans).items():
            if rank[part] != nanoseconds:
                return f"{part} of rank {rank['rank']} is {rank[part]} ns, and its events give {nanoseconds}"
    return ""


def _sweep(spans: list[tuple[str, int, int]]) -> dict[str, int]:
    """The partition by definition, from (part, start, end): the first of `PARTS` that is running gets the time."""
    edges = sorted(edge for part, start, end in spans for edge in ((start, 1, part), (end, -1, part)))
    found, running = dict.fromkeys(PARTS, 0), dict.fromkeys(PARTS, 0)
    for (at, change, part), following in pairwise(edges):
        running[part] += change
        found[next(name for name in PARTS if running[name] or name == "idle")] += following[0] - at
    return found | {"span": sum(found.values())}


def _complete(told: Facts, case: Case) -> str:
    """Whether every pair of the mask is in the report once, and every byte of the plan."""
    plan = plan_of(case)
    seen = int(oracle.dense_mask(case.make_mask(), case.length).sum())
    shared = plan.head_parallel_size * plan.head_groups  # each group of heads sees every pair
    for backward, name in enumerate(PASSES):
        pieces = [step for step in told["steps"] if step["backward"] == backward]
        pairs = sum(cell["pairs"] for step in pieces for cell in step["ranks"])
        if pairs != seen * shared:
            return f"{name}: {pairs} pairs are in the report, and the mask has {seen * shared}"
        kernels = [rank["passes"][name]["kernels"] for rank in told["ranks"]]
        planned = [_computes(plan, name, rank) for rank in range(case.ranks)]
        if kernels != planned:
            return f"{name}: {kernels} kernels per rank are in the report, and the plan has {planned}"
    return ""


def _computes(plan: Plan, name: PassName, rank: int) -> int:
    return plan.head_groups * sum(step.compute is not None for step in plan.steps(name, rank))


# ------------------------------------------------------------------------------------------------------- the clock


class _Held(WrappedKernel):
    """Takes `HELD` longer, forward."""

    def attend(self, *args: Any, **options: Any) -> State:
        time.sleep(HELD)
        return self.wrapped.attend(*args, **options)

    def forward_single_call(self, *args: Any, **options: Any) -> State:
        time.sleep(HELD)
        return self.wrapped.forward_single_call(*args, **options)


@contextmanager
def _holding() -> Iterator[None]:
    """Within this context, the kernels that a session records are held."""
    record = installed.get()
    assert record is not None, "inside a session"
    token = installed.set(lambda prepared, mesh: record(replace(prepared, kernel=_Held(prepared.kernel)), mesh))
    try:
        yield
    finally:
        installed.reset(token)


def _clock(subject: Subject) -> Outcome:
    """Kernels that are held for a known time show it, in nanoseconds of the host's clock, when it passed."""
    case = Case(ranks=1)
    with profile() as session, _holding():
        began = time.perf_counter_ns()
        run_case(subject, case, make_inputs(case))
        ended = time.perf_counter_ns()
    told = _told(session)
    (rank,) = told["ranks"]
    first, last = rank["window"]
    held = rank["passes"]["forward"]["compute"]
    if not HELD * 1e9 - _MARGIN <= held <= ended - began:
        return Outcome(wrong=f"a kernel that took {HELD * 1e3:g} ms or a little more is told as {held / 1e6:.3f} ms")
    if first < began - _MARGIN or last > ended + _MARGIN:
        return Outcome(wrong="the times that are told lie outside of those in which it ran")
    return Outcome()


CHECK = Check(NAME, "the profiler's partition adds up and is complete, on this device's clock; no bit changes", trials)
