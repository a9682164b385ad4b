"""Test `burst-portable conform`: the files it writes, its exit codes, its errors."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest

from burst_portable.cli import main
from burst_portable.conformance import Report
from tests.support import planted_bugs
from tests.support.planted_bugs import Planted


def test_conform_writes_every_format(tmp_path, capsys):
    files = [tmp_path / name for name in ("r.json", "r.xml", "r.md")]
    formats = [word for pair in zip(("--json", "--junit", "--markdown"), map(str, files), strict=True) for word in pair]
    options = ["--backend", "cpu", "--quick", "--ranks", "2", "--only", "transport,fully_masked"]
    assert main(["conform", *options, *formats]) == 0
    captured = capsys.readouterr()
    left_out = "claims, kernels, attention, sizes, extremes, memory, determinism, profiler, group"
    assert f"cpu passed the selected tests (transport, fully_masked; not {left_out}): 1" in captured.out
    assert "reference was not examined: no selected test computed with it" in captured.out
    assert (
        "evidence: device (kernels ran on the real device 'cpu', as the backend or the caller states)" in captured.out
    )
    # Without a terminal, there is one line per completed group.
    told = re.findall(r"^(\w+): (\d+) checks in \d+\.\d s$", captured.err, re.MULTILINE)
    counts = {line.check: line.passed + line.skipped for line in Report.from_json(files[0].read_text()).lines()}
    assert {group: int(count) for group, count in told} == counts
    assert [group for group, _ in told] == list(counts)
    assert len(captured.err.splitlines()) == len(told) == 2
    assert Report.from_json(files[0].read_text()).ok
    assert ElementTree.fromstring(files[1].read_text()).tag == "testsuites"
    assert files[2].read_text().startswith("# Conformance of `cpu`: passed")


WRONG = {
    "backend": (["--backend", "cup"], "did you mean 'cpu'"),
    "not here": (["--backend", "cuda"], "cannot run here"),
    "group": (["--backend", "cpu", "--only", "nothing"], "unknown group"),
    "case": (["--backend", "cpu", "--case", "attention:mask=no"], "unknown mask"),
    "trial": (["--backend", "cpu", "--case", "claims:no"], "unknown test"),
    "ranks": (["--backend", "cpu", "--ranks", "0"], "1 to 64"),
    "ranks, no number": (["--backend", "cpu", "--ranks", "two"], "--ranks"),
    "kernel": (["--backend", "cpu", "--kernel", "no"], "unknown kernel"),
    "two kernels": (
        ["--backend", "cpu", "--kernel", "cpu_flash", "--case", "kernels:reference:default"],
        "another kernel",
    ),
    "evidence level": (["--backend", "cpu", "--evidence-level", "gold"], "unknown evidence level"),
    "both": (["--quick", "--full"], "exclude"),
    "file": (["--backend", "cpu", "--json", "/no/such/folder/x.json"], "cannot be written"),
}


@pytest.mark.parametrize(("options", "says"), WRONG.values(), ids=list(WRONG))
def test_conform_reports_bad_input_in_one_line(options, says, capsys):
    assert main(["conform", *options]) == 2
    error = capsys.readouterr().err
    assert says in error
    assert "Traceback" not in error


def test_conform_returns_1_on_failure(monkeypatch, capsys):
    monkeypatch.setattr("burst_portable.conformance.suite.load", lambda name: Planted(planted_bugs.WrongScale))
    assert main(["conform", "--backend", "planted", "--case", "kernels:reference:ranks=1"]) == 1
    printed, told = capsys.readouterr()
    assert "does not conform" in printed
    failure = "failed kernels:reference:ranks=1: error of .*; allowed: .*"
    assert re.fullmatch(failure + r"\nkernels: 1 check in \d+\.\d s, 1 failed\n", told)
    assert "repeat:   burst-portable conform --backend planted --case kernels:reference:" in printed
