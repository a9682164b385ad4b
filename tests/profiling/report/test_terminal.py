"""Test a report on a terminal."""

from __future__ import annotations

from rich.console import Console

from burst_portable.cli import main
from burst_portable.profiling.report import Report
from burst_portable.profiling.report.tables import step_rows
from burst_portable.profiling.report.terminal import show
from tests.support.synthetic_records import Maker


def test_terminal_report_begins_with_verdict(files, capsys):
    assert main(["profile", str(files / "slow.json")]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("SLOW RANK  Rank 2 computes slowly")
    assert max(map(len, printed.splitlines()[2:])) <= 80


def test_terminal_indents_wrapped_verdict(files, capsys):
    """A log gets a single line, which can be searched."""
    data = Report.load(files / "slow.json").data
    data["summary"]["text"] = data["summary"]["text"] + " [not] markup"
    for on_terminal in (True, False):
        show(data, Console(force_terminal=on_terminal, width=80, color_system=None))
        lines = capsys.readouterr().out.splitlines()
        end = next(i for i, line in enumerate(lines) if line.startswith("  what to do  "))
        assert (end > 1) == on_terminal
        assert all(line.startswith(" " * len("SLOW RANK  ")) for line in lines[1:end])
        told = " ".join(line.strip() for line in lines[:end])
        assert told.removeprefix("SLOW RANK").strip() == data["summary"]["text"]
        assert (max(map(len, lines)) <= 80) == on_terminal


def test_narrow_terminal_truncates_no_number(files, capsys):
    """Numbers were once truncated to dots, while the bar next to them kept its width."""
    data = Report.load(files / "slow.json").data
    for width in (40, 60, 80):
        show(data, Console(force_terminal=True, width=width, color_system=None))
        printed = capsys.readouterr().out
        assert "…" not in printed
        assert ("partition" in printed) == (width >= 80)
        assert max(map(len, printed.splitlines())) <= width


def test_step_rows_name_rank_with_longest_compute(files, capsys):
    """Rank 1 computes for 400 µs; rank 0 finishes after 100 µs and waits for 450 µs."""
    a, b = Maker(0), Maker(1)
    a.compute(1, 0, 100)
    b.compute(1, 0, 400)
    a.message(1, 1, sends=False, posted=0, start=100, end=550, owner=1, issued=0)
    b.message(1, 0, sends=True, posted=400, start=400, end=401, owner=1, issued=0)
    report = Report.of([a.records(), b.records()])
    row = step_rows(report.data)[-1]
    assert (row["slowest"], row["slowest_compute"], row["longest_wait"]) == (1, 400_000, 450_000)
    report.print()
    line = next(line for line in capsys.readouterr().out.splitlines() if "forward 1" in line)
    assert line.split()[-5:-2] == ["1", "400", "µs"], line


def test_terminal_separates_communication_and_copies(capsys):
    """200 µs of exposed communication and 30 µs of exposed copies."""
    maker = Maker(0)
    maker.compute(0, 0, 100)
    maker.collective(0, 100, 300)
    maker.copy(0, 300, 330)
    report = Report.of([maker.records()])
    report.print()
    lines = capsys.readouterr().out.splitlines()
    header, row = (next(x for x in lines if x.split()[:1] == [first]) for first in ("rank", "0"))
    assert header.split()[:7] == ["rank", "span", "computing", "exposed", "copies", "blocking", "idle"]
    assert "330 µs 100 µs 200 µs 30.0 µs 200 µs 0 ns" in " ".join(row.split())
    assert "| 0 | 330 µs | 100 µs | 200 µs | 30.0 µs | 200 µs | 0 ns |" in report.markdown()
