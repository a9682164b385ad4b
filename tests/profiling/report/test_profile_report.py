"""Test the report of a profile: its contents, and the files made from it."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

import burst_portable as bp
from burst_portable.cli import main
from burst_portable.profiling.ablation import Ablation
from burst_portable.profiling.report import Report
from burst_portable.profiling.report.tables import ablation_text
from tests.support.synthetic_records import Maker, ring, with_ablation


def test_report_without_transfer_times_round_trips(tmp_path):
    """A link whose messages all arrived before the wait, and hosts with unrelated clocks."""
    a, b = Maker(0), Maker(1)
    for one in (a, b):
        one.compute(0, 0, 100)
        one.message(1, 1 - one.rank, sends=True, posted=10, start=90, end=91, owner=one.rank, issued=0)
        one.message(1, 1 - one.rank, sends=False, posted=10, start=100, end=101, owner=1 - one.rank, issued=0)
    far = Maker(1, "another host")
    far.compute(0, 0, 100)
    plan = bp.plan(seq_len=256, ranks=2, heads=2, head_dim=16)
    for name, makers in (("links", (a, b)), ("hosts", (a, far))):
        report = Report.of([one.records(plan) for one in makers])
        report.write_json(tmp_path / name)
        report.write_html(tmp_path / f"{name}.html")
        assert Report.load(tmp_path / name).data == report.data
    assert [link["bytes_per_second"] for link in Report.load(tmp_path / "links").data["links"]] == [None, None]
    assert Report.load(tmp_path / "hosts").data["clock"]["uncertainty_ns"] is None


def test_light_report_omits_unrecorded_totals(tmp_path, capsys):
    """The 24 bytes of the agreement are not the total sent."""
    maker = Maker(0)
    maker.collective(0, 0, 10)
    maker.compute(0, 10, 110)
    for level in ("basic", "standard"):
        record = maker.records()
        report = Report.of([replace(record, facts={**record.facts, "level": level})])
        report.print()
        printed = " ".join(capsys.readouterr().out.split())
        report.write_html(tmp_path / "l.html")
        page = (tmp_path / "l.html").read_text(encoding="utf-8")
        for text in (printed, page, report.markdown()):
            assert ("a report at level basic" in text) == (level == "basic")
        assert ("communication hidden" in printed) == ("24 B sent" in printed) == (level != "basic"), printed
        assert ('data-path="ranks.0.sent_bytes"' in page) == (level != "basic")
        assert ('data-path="ranks.0.exposed_copy_ns"' in page) == (level != "basic")
        assert ("| 10.0 µs | - | 10.0 µs |" in report.markdown()) == (level == "basic"), report.markdown()


def test_profile_writes_other_formats(files, capsys):
    names = [files / name for name in ("p.html", "p.json", "p.md")]
    wanted = ["--html", names[0], "--chrome", names[1], "--markdown", names[2]]
    assert main(["profile", str(files / "slow.json"), *map(str, wanted), "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    report = Report.load(files / "slow.json")
    assert printed["ranks"] == report.data["ranks"]
    assert printed["summary"]["rank"] == 2
    assert report.summary in names[0].read_text(encoding="utf-8").replace("\u00a0", " ")
    assert report.summary in names[2].read_text(encoding="utf-8")


def test_ablation_is_in_every_format(tmp_path, capsys):
    report = Report.of(with_ablation(ring(2, 3)))
    report.write_json(tmp_path / "a.json")
    wanted = ["--html", str(tmp_path / "a.html"), "--markdown", str(tmp_path / "a.md")]
    assert main(["profile", str(tmp_path / "a.json"), *wanted]) == 0
    printed = capsys.readouterr().out
    row = ("20.0 ms", "3.00 ms", "5.00 ms", "2.00 ms", "10.0 ms")
    assert f"rank 1 {' '.join(row)}" in " ".join(printed.split())
    assert max(map(len, printed.splitlines()[2:])) <= 80
    assert f"| rank 1 | {' | '.join(row)} |" in (tmp_path / "a.md").read_text(encoding="utf-8")
    assert ">Ablation<" in (tmp_path / "a.html").read_text(encoding="utf-8")
    assert main(["profile", str(tmp_path / "a.json"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["ablation"] == report.data["ablation"]
    assert "a step of 20.0 ms on rank 0" in ablation_text(report.data)
    told = {name: text for names, text in report.data["evidence"].items() for name in names.split(", ")}
    assert told["hidden_ns"].startswith("ablation: ")


def test_ablation_text_has_no_negative_time():
    """Steps may be shorter with messages or kernels than without, by noise."""
    facts = {"rank": 1, **Ablation(0.0200, 0.0203, 0.0199, 0.0198).facts()}
    told = ablation_text({"ablation": [facts]})
    assert facts["exposed_communication_ns"] == -300_000
    assert "attention's messages add no measurable time, its kernels add 100 µs, 400 µs are hidden" in told
    assert "-" not in ablation_text({"ablation": [{"rank": 0, **Ablation(0.0200, 0.0203, 0.0201, 0.0206).facts()}]})


def test_report_states_drift_of_device_clocks(tmp_path, capsys):
    records = ring(2, 3)
    told = [{"ppm": 12.5 * one.rank, "uncertainty_ppm": 0.2, "corrected": True} for one in records]
    report = Report.of([replace(r, facts={**r.facts, "drift": t}) for r, t in zip(records, told, strict=True)])
    assert [row["ppm"] for row in report.data["drift"]] == [0.0, 12.5]
    report.write_json(tmp_path / "d.json")
    assert main(["profile", str(tmp_path / "d.json"), "--html", str(tmp_path / "d.html")]) == 0
    text = "device clocks drift by up to 12 ppm, corrected"
    assert text in " ".join(capsys.readouterr().out.split())
    assert text in (tmp_path / "d.html").read_text(encoding="utf-8")


def test_idle_time_ends_with_window():
    """The wait from 110 to 130 is for a message of 50, and the last event ends at 100."""
    one = Maker(0)
    one.compute(0, 0, 100)
    one.message(1, 1, sends=False, posted=0, start=110, end=130, arrived=50)
    (rank,) = Report.of([one.records()]).data["ranks"]
    assert (rank["span_ns"], rank["idle_ns"]) == (100_000, 0)
    assert (rank["idle_between_kernels_ns"], rank["idle_outside_attention_ns"]) == (0, 0)


def test_skipping_all_steps_raises_distinct_error():
    """One unmarked step, and three steps with skip=3."""
    with bp.profile() as session:
        bp.attention(*(torch.randn(1, 8, 1, 8) for _ in range(3)))
        bp.attention(*(torch.randn(1, 8, 1, 8) for _ in range(3)))
    assert session.report() is not None
    with pytest.raises(
        bp.BurstError, match=r"all recorded training steps are skipped.*1 training step, skip=1.*mark\(\)"
    ):
        session.report(skip=1)
    maker = Maker(0)
    for maker.train_step in range(3):
        maker.compute(0, 100 * maker.train_step, 100 * maker.train_step + 50)
    assert Report.of([maker.records()], skip=2).data["ranks"][0]["span_ns"] == 50_000
    with pytest.raises(bp.BurstError, match="3 training steps, skip=3"):
        Report.of([maker.records()], skip=3)


@pytest.mark.parametrize("skip", [-1, 1.5, "x", True])
def test_report_rejects_invalid_skip(skip):
    with pytest.raises(bp.BurstError, match="skip must be a number of training steps"):
        Report.of(ring(2, 3), skip=skip)
