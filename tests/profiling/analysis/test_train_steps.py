"""Test training steps between marks: the shortest, median and longest step, and the part of attention."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
import torch

import burst_portable as bp
from burst_portable.cli import main
from burst_portable.profiling.analysis.analyze import analyze
from burst_portable.profiling.analysis.train_steps import training_text
from burst_portable.profiling.event_tables import RankRecords, pack, unpack
from burst_portable.profiling.report import Report
from burst_portable.profiling.report.schema import find_error
from tests.support.recorded_calls import one_step
from tests.support.synthetic_records import Maker

SLEPT = 0.2  # seconds


def marked(usual: float = 1000, longest: float = 2600) -> list[RankRecords]:
    """Return records of five steps of `usual` µs. Step 2 takes up to `longest` µs, and 100 less on rank 0."""
    makers = Maker(0), Maker(1)
    for one in makers:
        at = 50.0
        for step in range(5):
            took = usual if step != 2 else longest - 100 + 100 * one.rank
            one.compute(0, at + 100, at + 350)
            one.compute(0, at + 500, at + 600, backward=1)
            one.compute(1, at + 620, at + 650, backward=1)  # the 20 between kernels also count as attention
            one.mark(at, at + took)
            at += took
    plan = bp.plan(seq_len=128, ranks=2, heads=2, head_dim=16, itemsize=4, strategy="ring")
    return [one.records(plan) for one in makers]


def test_training_steps_and_their_attention_share():
    told = analyze(marked())["training"]
    steps = told.pop("steps")
    assert told == {
        "shortest_ns": 1_000_000, "median_ns": 1_000_000, "longest_ns": 2_600_000, "longest_step": 2, "longest_rank": 1,
        "longest_attention_ns": 400_000, "attention_share": 4_000 / (4 * 1000 + 2500 + 4 * 1000 + 2600),
    }  # fmt: skip
    assert [one["train_step"] for one in steps] == [0, 1, 2, 3, 4]
    assert steps[2]["ranks"] == [
        {"rank": 0, "duration_ns": 2_500_000, "attention_ns": 400_000},
        {"rank": 1, "duration_ns": 2_600_000, "attention_ns": 400_000},
    ]


def test_analyze_skips_given_steps_and_steps_without_attention():
    told = analyze(marked(), skip=3)["training"]
    assert ([one["train_step"] for one in told["steps"]], told["longest_ns"]) == ([3, 4], 1_000_000)
    maker = Maker(0)
    maker.compute(0, 0, 10)
    maker.mark(0, 30)
    maker.mark(30, 31)
    report = analyze([maker.records()])
    assert [one["train_step"] for one in report["training"]["steps"]] == [0]
    assert training_text(report) == "training step 0, counted from 0, took 30.0 µs, 33.3 % of it attention"
    assert analyze([Maker(0).records()])["training"] is None


def test_median_of_two_steps():
    maker = Maker(0)
    for start, end in ((0, 100), (100, 400)):
        maker.compute(0, start, end)
        maker.mark(start, end)
    assert analyze([maker.records()])["training"]["median_ns"] == 200_000


def test_marks_are_packed_and_shifted_with_clock():
    one = marked()[1]
    assert [tuple(row) for row in unpack(pack(one)).train_steps] == one.train_steps
    assert one.shift(7).train_steps[0] == (0, 50_007, 1_050_007)


def test_all_report_formats_contain_training_steps(tmp_path, capsys):
    report = Report.of(marked())
    report.write_json(tmp_path / "r.json")
    wanted = ["--html", str(tmp_path / "r.html"), "--markdown", str(tmp_path / "r.md")]
    assert main(["profile", str(tmp_path / "r.json"), *wanted]) == 0
    text = (
        "5 training steps: shortest 1.00 ms, median 1.00 ms, longest 2.60 ms (step 2, counted from 0, on rank 1); "
        "attention takes 15.4 % of the longest, 30.5 % of all"
    )
    assert training_text(report.data) == text
    assert text in " ".join(capsys.readouterr().out.split())
    assert text in (tmp_path / "r.md").read_text(encoding="utf-8")
    assert text in (tmp_path / "r.html").read_text(encoding="utf-8")


def test_compare_fails_on_slower_median_step_only(tmp_path, capsys):
    """A single long step, for example with a checkpoint, is not a slower program."""
    files = {name: str(tmp_path / f"{name}.json") for name in ("before", "rest", "once", "bare")}
    for name, durations in (("before", (1000, 2600)), ("rest", (1300, 2600)), ("once", (1000, 2900))):
        Report.of(marked(*durations)).write_json(files[name])
    bare = Report.of(marked()).data
    Path(files["bare"]).write_text(json.dumps({**bare, "training": None}))

    assert main(["compare", files["before"], files["rest"]]) == 1
    said = " ".join(capsys.readouterr().out.split())
    assert "median training step: by more than 10 %" in said
    for name in ("shortest", "median"):
        assert f"{name} training step 1.00 ms 1.30 ms 1.3" in said
    assert said.endswith("longest training step 2.60 ms 2.60 ms 1.00")
    assert main(["compare", files["before"], files["rest"], "--threshold", "0.4"]) == 0
    capsys.readouterr()
    assert main(["compare", files["before"], files["once"], "--json"]) == 0
    parts = {one["name"]: one for one in json.loads(capsys.readouterr().out)["parts"]}
    longest = parts["longest_step"]
    assert (longest["before_ns"], longest["after_ns"], longest["worse"]) == (2_600_000, 2_900_000, False)
    for pair in (("before", "bare"), ("bare", "before")):
        assert main(["compare", *map(files.get, pair)]) == 0
        assert "median training step" not in capsys.readouterr().out


def test_reports_without_training_are_valid():
    data = Report.of(marked()).data
    assert find_error({**data, "training": None}) == ""
    assert "report.training has no longest_ns" in find_error({**data, "training": {"shortest_ns": 1, "median_ns": 1}})
    assert "report.training.steps is an empty list" in find_error(
        {**data, "training": {**data["training"], "steps": []}}
    )


def test_sleep_outside_attention_makes_longest_step():
    def work(mesh):
        with bp.profile(mesh=mesh) as session:
            time.sleep(SLEPT)  # not part of the first step, because a mark follows
            session.mark()
            for step in range(4):
                one_step(mesh, "ring")
                if step == 2:
                    time.sleep(SLEPT)
                session.mark()
            one_step(mesh, "ring")  # no mark follows
        return session.report(skip=1)  # the first step also warms up

    report = bp.run_threads(3, work)[0]
    told = report.data["training"]
    assert [one["train_step"] for one in told["steps"]] == [1, 2, 3]
    assert all([row["rank"] for row in one["ranks"]] == [0, 1, 2] for one in told["steps"])
    assert told["longest_step"] == 2
    slow = told["steps"][1]["ranks"]
    assert all(row["duration_ns"] - row["attention_ns"] >= SLEPT * 1e9 for row in slow)
    others = [
        row["duration_ns"] - row["attention_ns"]
        for one in told["steps"]
        for row in one["ranks"]
        if one["train_step"] != 2
    ]
    assert max(others) < SLEPT * 1e9


@pytest.mark.parametrize("marks_first", [False, True])
def test_first_training_step_starts_at_session_or_mark(marks_first):
    with bp.profile() as session:
        time.sleep(SLEPT)
        if marks_first:
            session.mark()
        bp.attention(*(torch.randn(1, 8, 1, 8) for _ in range(3)))
        session.mark()
    ((iteration, start, end),) = session.records()[0].train_steps
    assert iteration == 0
    assert (end - start >= SLEPT * 1e9) == (not marks_first)
