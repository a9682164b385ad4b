"""Test that a profile names faults of a tenth of a step, and none if there is no fault."""

from __future__ import annotations

import time

import pytest
import torch

import burst_portable as bp
from burst_portable.profiling.analysis.analyze import analyze
from tests.support.synthetic_records import Maker, training_run

RANKS = 2, 3, 4, 8
FAULTS = "late rank", "slow link", "slow rank", "slow host", "agreement", "communication"


@pytest.mark.parametrize("seeds", [range(8), pytest.param(range(8, 100), marks=pytest.mark.full)])
def test_runs_without_fault_raise_no_alarm(seeds):
    for seed in seeds:
        summary = analyze(training_run(seed, RANKS[seed % 4]))["summary"]
        assert summary["kind"] == "none", (seed, summary["text"])
        assert summary["text"].startswith("Nothing stands out; the largest losses are: ")


@pytest.mark.parametrize("seeds", [range(2, 4), pytest.param(range(4, 24), marks=pytest.mark.full)])
@pytest.mark.parametrize("fault", FAULTS)
def test_fault_of_a_tenth_of_a_step_is_named(fault, seeds):
    for seed in seeds:
        summary = analyze(training_run(seed, RANKS[seed % 4], fault=fault, share=0.1))["summary"]
        named = fault, 1 if fault.startswith(("slow", "late")) else -1
        assert (summary["kind"], summary["rank"]) == named, (seed, summary["text"])
        assert summary["share"] == pytest.approx(0.1, abs=0.03)


@pytest.mark.parametrize("late", [(1,), (1, 3, 5)])
def test_loss_in_a_single_step_does_not_stand_out(late):
    """Rank 1 is late by a whole step, in one of six steps or in three: the latter is not a single event."""
    makers = Maker(0), Maker(1)
    at = 0
    for step in range(6):
        begin, at = at, at + 1000 * (step in late)
        for one in makers:
            one.collective(0, at if one.rank else begin, at + 1)
            one.compute(0, at + 1, at + 1000)
            one.mark(begin, at + 1000)
        at += 1000
    report = analyze([one.records() for one in makers])
    kind = "late rank" if len(late) > 1 else "none"
    assert (report["summary"]["kind"], report["bottlenecks"][0]["kind"]) == (kind, "late rank")


@pytest.mark.full
@pytest.mark.alone
def test_real_runs_without_fault_raise_no_alarm():
    """Two threads. A run in which other processes took a core from a rank is a run with a fault, and does not count."""

    def work(mesh: bp.Mesh) -> tuple[dict | None, float]:
        q, k, v = (torch.randn(1, 1024, 4, 32, requires_grad=True) for _ in range(3))
        bp.attention(q, k, v, mesh=mesh, strategy="ring").sum().backward()
        began = time.thread_time()
        with bp.profile(mesh=mesh) as session:
            for _ in range(8):
                bp.attention(q, k, v, mesh=mesh, strategy="ring").sum().backward()
                time.sleep(0.02)
                session.mark()
        took = time.thread_time() - began
        report = session.report()
        return report and report.data, took

    counted = 0
    for _ in range(20):
        results = bp.run_threads(2, work)
        data = results[0][0]
        if all(r["compute_ns"] * 1e-9 < 1.03 * took for r, (_, took) in zip(data["ranks"], results, strict=True)):
            counted += 1
            assert data["summary"]["kind"] == "none", data["summary"]["text"]
    if not counted:
        pytest.skip("other processes took the cores in all runs")
