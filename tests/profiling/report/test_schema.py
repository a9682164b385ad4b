"""Test which files are rejected as reports."""

from __future__ import annotations

import json

import pytest

import burst_portable as bp
from burst_portable.cli import main
from burst_portable.profiling.report import Report
from burst_portable.profiling.report.schema import find_error
from tests.support.synthetic_records import Maker, ring


def test_profile_and_compare_reject_other_files(files, capsys):
    (files / "other.json").write_text('{"schema": "something/1"}')
    assert main(["profile", str(files / "other.json")]) == 2
    assert "something/1" in capsys.readouterr().err
    assert main(["compare", str(files / "missing.json"), str(files / "even.json")]) == 2
    Report.of(ring(2, 3)).write_json(files / "two.json")
    assert main(["compare", str(files / "two.json"), str(files / "even.json")]) == 2
    with pytest.raises(bp.BurstError, match="nothing was recorded"), bp.profile() as session:
        session.report()


def test_traced_kernel_without_place_is_rejected():
    """The page names the place of each kernel."""
    one = Maker(0)
    one.compute(0, 0, 100)
    one.traced(0, 0, 90)
    data = Report.of([one.records(bp.plan(seq_len=64, ranks=1, heads=2, head_dim=16))]).data
    assert find_error(data) == ""
    del data["kernel_trace"][0]["kernels"][0]["activity"]
    assert find_error(data) == "report.kernel_trace[0].kernels[0] has no activity"


def test_times_that_do_not_add_up_are_rejected(files, tmp_path):
    written = json.loads((files / "even.json").read_text())
    for name, row in (("ranks", written["ranks"][0]), ("ring_steps", written["ring_steps"][0]["ranks"][0])):
        for more in (1, -(1 << 40)):
            row["idle_ns"] += more
            (tmp_path / "changed.json").write_text(json.dumps(written))
            row["idle_ns"] -= more
            with pytest.raises(bp.BurstError, match=rf"report\.{name}\[0\] has parts that do not add up"):
                Report.load(tmp_path / "changed.json")
