"""Test that a profile names faults of a tenth of a step, and none if there is no fault."""

from __future__ import annotations

import html
import json
import subprocess
import sys
import time
from dataclasses import replace

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


@pytest.mark.parametrize(
    "seeds", [range(4), *(pytest.param(range(4, 100)[i::3], marks=pytest.mark.full) for i in range(3))]
)
def test_shared_cores_raise_no_alarm(seeds):
    for seed in seeds:
        summary = analyze(training_run(seed, RANKS[seed % 4], shared_cores=True))["summary"]
        assert summary["kind"] == "none", (seed, summary["text"])
        assert "The threads of a rank waited " in summary["text"]
        assert "share their cores" in summary["recommendation"]


def test_shared_cores_raise_alarms_without_core_waits():
    """Without the scheduler's count, the check that calls agree is named: it takes up to 20 % of each step."""
    runs = [training_run(seed, 2, shared_cores=True) for seed in range(4)]
    kinds = [analyze([replace(one, core_waits=()) for one in run])["summary"]["kind"] for run in runs]
    assert kinds.count("agreement") >= 2, kinds


@pytest.mark.parametrize("seeds", [range(2, 4), pytest.param(range(4, 12), marks=pytest.mark.full)])
@pytest.mark.parametrize("fault", ["late rank", "slow link", "slow rank"])
def test_fault_on_shared_cores_is_named(fault, seeds):
    """The fault takes four times as long as a step on a quiet machine, half of the time or more."""
    for seed in seeds:
        summary = analyze(training_run(seed, RANKS[seed % 4], fault=fault, share=0.8, shared_cores=True))["summary"]
        assert (summary["kind"], summary["rank"]) == (fault, 1), (seed, summary["text"])


def test_core_wait_is_counted_without_skipped_steps():
    makers = Maker(0), Maker(1)
    for one in makers:
        for step in range(3):
            one.collective(0, 1000 * step, 1000 * step + 10)
            one.compute(0, 1000 * step + 10, 1000 * step + 1000)
            one.mark(1000 * step, 1000 * step + 1000, core_wait=10**step)
    report = analyze([one.records() for one in makers], skip=1)
    assert [rank["core_wait_ns"] for rank in report["ranks"]] == [110_000, 110_000]


def test_spread_is_named_only_for_losses_within_it():
    """A tenth of each step is lost. Steps of different lengths differ by a third of their median."""
    texts = []
    for ends, core_wait in (((1000,), 500), ((1000, 2000, 3000), 500), ((1000, 3000, 4000, 7000), 0)):
        makers, begin = (Maker(0), Maker(1)), 0
        for end in ends:
            for one in makers:
                one.collective(0, begin, begin + (end - begin) / 10)
                one.compute(0, begin + (end - begin) / 10, end)
                one.mark(begin, end, core_wait=core_wait)
            begin = end
        summary = analyze([one.records() for one in makers])["summary"]
        assert summary["kind"] == "none"
        texts.append(summary["text"].partition(". ")[0].partition("are: ")[2])
    assert texts == ["agreement 10.0 %", "agreement 10.0 %", "agreement 10.0 % (steps differ by 33.3 %)"]


@pytest.mark.full
@pytest.mark.alone
def test_real_threads_without_fault_raise_no_alarm():
    def work(mesh: bp.Mesh) -> dict | None:
        q, k, v = (torch.randn(1, 1024, 4, 32, requires_grad=True) for _ in range(3))
        bp.attention(q, k, v, mesh=mesh, strategy="ring").sum().backward()
        with bp.profile(mesh=mesh) as session:
            for _ in range(8):
                bp.attention(q, k, v, mesh=mesh, strategy="ring").sum().backward()
                time.sleep(0.02)
                session.mark()
        report = session.report()
        return report and report.data

    for _ in range(20):
        data = bp.run_threads(2, work)[0]
        assert data["summary"]["kind"] == "none", data["summary"]["text"]


@pytest.mark.full
@pytest.mark.alone
@pytest.mark.parametrize("neighbors", [0, 1])
@pytest.mark.parametrize("seq_len", ["256", "1024"])
def test_real_demo_without_fault_raises_no_alarm(seq_len, neighbors, tmp_path):
    """Two processes train as in README's demo, also with another process on their cores."""
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(neighbors)]
    arguments = ["run", "--model", "tiny", "--ranks", "2", "--seq-len", seq_len, "--steps", "10", "--profile"]
    try:
        for _ in range(10):
            command = [sys.executable, "-m", "burst_portable", *arguments, "--report", str(tmp_path)]
            subprocess.run(command, check=True, capture_output=True)
            summary = json.loads((tmp_path / "profile.json").read_text(encoding="utf-8"))["summary"]
            assert summary["kind"] == "none", summary["text"]
            page = html.unescape((tmp_path / "profile.html").read_text(encoding="utf-8"))
            assert summary["text"] in page.replace("\u00a0", " ")
    finally:
        for one in busy:
            one.kill()
            one.wait()
