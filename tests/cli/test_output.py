"""Test outputs: JSON on standard output, failing streams, files."""

from __future__ import annotations

import errno
import io
import json
import os
import signal
import sys
from pathlib import Path

import pytest
from rich.console import Console

from burst_portable.cli import app, main, output
from burst_portable.cli.app import add_json_value
from burst_portable.cli.output import JsonOption, check_file, check_files, check_folder
from burst_portable.errors import InputError

SAMPLE = Path(__file__).parents[2] / "profiling" / "sample" / "slow_link.json"
PLAN = ("plan", "--seq-len", "64", "--ranks", "2", "--heads", "2")


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("plan --json", "plan --json -"),
        ("plan --json - --rank 1", "plan --json - --rank 1"),
        ("plan --json --rank 1", "plan --json - --rank 1"),
        ("plan --json plan.json --rank 1", "plan --json plan.json --rank 1"),
        ("run --json=out.json", "run --json=out.json"),
        ("trace a.json b.json --json", "trace a.json b.json --json -"),
        ("profile a.json --json --html a.html", "profile a.json --json - --html a.html"),
        ("profile a.json --json b.json", "profile a.json --json b.json"),
        ("", ""),
    ],
)
def test_json_option_may_omit_value(typed, meant):
    assert add_json_value(typed.split()) == meant.split()


def test_narrow_table_truncates_no_name():
    """At 40 columns, `launch_latency` was truncated."""
    made = output.table("rate", "value", "how", left=["how"])
    made.add_row("launch_latency", "11.2 ms", "forward of cpu_flash, causal, and more that takes several lines")
    page = Console(file=io.StringIO(), width=24)
    page.print(made)
    told = page.file.getvalue()
    assert "…" not in told
    column = "".join(line[: line.index(" ")] for line in told.splitlines()[2:])
    assert column == "launch_latency"


@pytest.mark.parametrize("value", [("--json",), ("--json", "-"), ("--json=-",)])
def test_json_is_alone_on_standard_output(capsys, value):
    assert main([*PLAN, *value]) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out)["schema"] == "burst_portable.plan/6"
    assert captured.err == ""


def test_every_command_has_json_and_lists_exit_codes(capsys):
    for name in app.COMMANDS:
        assert main([name, "--help"]) == 0
        said = capsys.readouterr().out
        assert "--json" in said, name
        assert "Exit codes: 0 success" in said, name


def test_check_file_leaves_existing_file_unchanged(tmp_path):
    old, new = tmp_path / "old", tmp_path / "new"
    old.write_text("as it was")
    for file in (old, new, Path("/dev/null")):
        check_file(file, "--json")
    assert old.read_text() == "as it was"
    assert not new.exists()
    for file in (tmp_path, tmp_path / "no" / "folder", old / "below", Path("/dev/full"), Path("/proc/new")):
        with pytest.raises(InputError, match="--html"):
            check_file(file, "--html")


def test_check_files_rejects_equal_paths(tmp_path):
    file, again = tmp_path / "new", tmp_path / "." / "new"
    check_files({"--html": file, "--chrome": None, "--markdown": tmp_path / "other"})
    check_files({"--html": Path("/dev/null"), "--markdown": Path("/dev/null")})
    with pytest.raises(InputError, match="--html and --markdown name the same file"):
        check_files({"--html": file, "--markdown": again})


def test_check_folder_creates_folder(tmp_path):
    check_folder(tmp_path / "a" / "b", "--report")
    assert list((tmp_path / "a" / "b").iterdir()) == []
    (tmp_path / "file").write_text("x")
    for folder in (tmp_path / "file", tmp_path / "file" / "below", Path("/proc"), Path("/proc/new")):
        with pytest.raises(InputError, match="--report"):
            check_folder(folder, "--report")


def test_json_writes_nan_and_infinity_as_null(tmp_path):
    JsonOption(str(tmp_path / "x.json")).write({"a": float("nan"), "b": [1.5, float("inf")]})
    assert json.loads((tmp_path / "x.json").read_text()) == {"a": None, "b": [1.5, None]}


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_plan_prints_in_any_encoding(monkeypatch, encoding):
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding=encoding))
    assert main(PLAN) == 0
    said = written.getvalue().decode(encoding)
    assert ("kv0 → 1" if encoding == "utf-8" else "kv0 > 1") in said
    assert "check   ok" in said


@pytest.mark.parametrize(
    "arguments", [PLAN, (*PLAN, "--json"), ("--help",), ("plan", "--help")], ids=["tables", "json", "help", "its help"]
)
def test_closed_pipe_returns_sigpipe(monkeypatch, capsys, arguments):
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "w") as closed:
        monkeypatch.setattr(sys, "stdout", closed)
        assert main(arguments) == 128 + signal.SIGPIPE
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("arguments", [PLAN, (*PLAN, "--json")], ids=["tables", "json"])
def test_full_standard_output_returns_1(monkeypatch, capsys, arguments):
    with Path("/dev/full").open("w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        assert main(arguments) == 1
    assert capsys.readouterr().err == "burst-portable: the output cannot be written: No space left on device\n"


def test_closed_standard_output_is_reported(monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdout", None)
    assert main(PLAN) == 0
    assert main([*PLAN, "--json"]) == 2
    assert "closed standard output" in capsys.readouterr().err


@pytest.mark.parametrize(
    "command",
    [
        ["plan", "--seq-len", "131072", "--ranks", "8", "--ranks-per-node", "4"],
        ["doctor"],
        ["conform", "--list"],
        ["profile", str(SAMPLE)],
        ["compare", str(SAMPLE), str(SAMPLE)],
    ],
    ids=lambda command: command[0],
)
def test_tables_fit_narrow_terminal(capsys, monkeypatch, command):
    monkeypatch.setenv("TERM", "dumb")  # for such a terminal, rich assumes 80 columns and no colors
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert main(command) == 0
    lines = capsys.readouterr().out.splitlines()
    sentences = ("SLOW LINK", "  what to do", "  3 training steps", "  peaks of")  # wrapped by the terminal
    assert [line for line in lines if len(line.rstrip()) > 80 and not line.startswith(sentences)] == []
    assert [line for line in lines if "…" in line] == []


def test_long_label_is_printed_in_full(capsys):
    output.console().print(output.labelled("another_vendor", "no: [not] here"))
    assert capsys.readouterr().out.split() == ["another_vendor", "no:", "[not]", "here"]


def test_trace_json_does_not_replace_a_trace(tmp_path, capsys):
    """`trace --json a b` would write its JSON over the trace a."""
    first, second = tmp_path / "rank0.json", tmp_path / "rank1.json"
    for file in (first, second):
        file.write_text('{"traceEvents": []}')
    assert main(["trace", "--json", str(first), str(second)]) == 2
    assert "--json names an existing file of other content" in capsys.readouterr().err
    assert first.read_text() == '{"traceEvents": []}'


@pytest.mark.parametrize("command", [["profile", str(SAMPLE)], ["compare", str(SAMPLE), str(SAMPLE)]])
def test_readers_write_json_to_file_and_print_tables(tmp_path, capsys, command):
    file = tmp_path / "out.json"
    assert main([*command, "--json", str(file)]) == 0
    tables = capsys.readouterr().out
    assert tables
    assert not tables.startswith("{")
    assert main([*command, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads(file.read_text())


def fails(number: int):
    """Return a `Path.write_text` that fails like a disk that has filled up during the command."""

    def write_text(self, *ignored, **named):
        raise OSError(number, os.strerror(number))

    return write_text


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.ENOENT], ids=["full", "folder gone"])
@pytest.mark.parametrize(
    "arguments",
    [
        (*PLAN, "--json", "out"),
        ("conform", "--backend", "cpu", "--quick", "--only", "claims", "--junit", "out"),
        ("conform", "--backend", "cpu", "--quick", "--only", "claims", "--markdown", "out"),
        ("profile", str(SAMPLE), "--html", "out"),
        ("profile", str(SAMPLE), "--chrome", "out"),
        ("profile", str(SAMPLE), "--markdown", "out"),
    ],
    ids=lambda arguments: " ".join(arguments[:1] + arguments[-2:]),
)
def test_failed_write_names_file(monkeypatch, tmp_path, capsys, arguments, number):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Path, "write_text", fails(number))
    assert main(arguments) == 1
    told = f"burst-portable: out cannot be written; got {os.strerror(number)}; the file is incomplete or missing\n"
    assert capsys.readouterr().err.splitlines(keepends=True)[-1] == told


def test_console_prints_colons_of_masks_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    """rich replaces names such as the one between these colons by an emoji."""
    rows = output.table("mask")
    rows.add_row("window:100:0")
    output.console().print(rows, "window:100:0")
    assert capsys.readouterr().out.count("window:100:0") == 2
