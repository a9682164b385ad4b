"""Test that files of `bench` are compared and drawn, and damaged ones rejected."""

from __future__ import annotations

import json

import pytest

from burst_portable.bench.results import append_rows, compare
from burst_portable.cli import main
from tests.support.bench_rows import SETTINGS, measured, write_json


def test_compare_marks_differences_within_the_spread(tmp_path, capsys):
    row = {"mask": "full", "seq_len": 8, "ranks": 2, "kernel": "auto", "entry": "ring", "status": "ok"}
    old = {**row, **measured(2.0, 3.0), "forward_spread": 0.02, "backward_spread": 0.02}
    new = {**row, **measured(2.1, 3.1), "forward_spread": 0.01, "backward_spread": 0.05}
    assert compare([old], [new])[0][1:] == ("0.952", "0.968 ~")
    files = [tmp_path / "a.json", tmp_path / "b.json"]
    for file, one in zip(files, (old, new), strict=True):
        write_json(file, [one])
    assert main(["bench", "compare", *map(str, files), "--json", str(tmp_path / "c.json")]) == 0
    assert "1 marked ~ are within the spread of repeats" in capsys.readouterr().out
    (found,) = json.loads((tmp_path / "c.json").read_text())["rows"]
    assert (found["forward"], found["backward"], found["within_spread"]) == ("0.952", "0.968", ["backward"])


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"status": None}, "no status in row 2"),
        ({"status": "fine"}, "the status of row 2 is 'fine', none of ok, refused, wrong, failed"),
        ({"status": "wrong"}, "no reason in row 2"),
        ({"mask": None}, "no mask in row 2"),
        ({"forward_tflops": None}, "no forward_tflops in row 2"),
        ({"backward_seconds": 0.0}, "backward_seconds of row 2 is 0.0, not a positive number"),
        ({"backward_seconds": "fast"}, "backward_seconds of row 2 is 'fast', not a positive number"),
        ({"forward_tflops": float("nan")}, "forward_tflops of row 2 is nan, not a positive number"),
        ({"forward_sent_bytes": -1}, "forward_sent_bytes of row 2 is -1, not a number from 0"),
        ({"forward_spread": "x"}, "forward_spread of row 2 is 'x', not a number from 0"),
        ({"peak_bytes": True}, "peak_bytes of row 2 is True, not a number from 0"),
    ],
)
def test_files_with_damaged_rows_are_rejected(changes, told, tmp_path, capsys):
    """None removes a name. Every command that reads files names the row."""
    row = {"mask": "full", "seq_len": 64, "ranks": 2, "kernel": "auto", "entry": "ring", "status": "ok"}
    right = row | measured(1.0, 2.0)
    wrong = {name: value for name, value in {**right, **changes}.items() if value is not None or name == "peak_bytes"}
    files = [tmp_path / "a.json", tmp_path / "b.json"]
    write_json(files[0], [right])
    write_json(files[1], [right, wrong])
    lines = tmp_path / "rows.jsonl"
    append_rows(lines, SETTINGS, [right, wrong])
    for words in (["compare", *files], ["draw", files[1], "--picture", tmp_path / "a.svg"], ["--resume", lines]):
        assert main(["bench", *map(str, words)]) == 2
        assert told in capsys.readouterr().err


def test_bench_compare_tells_differences_of_files(tmp_path, capsys):
    where = {"mask": "full", "seq_len": 64, "ranks": 2, "kernel": "auto", "status": "ok"}
    rows = [where | {"entry": name, **measured(1.0, 2.0)} for name in ("ring", "burst")]
    first, second, third = (tmp_path / f"{name}.json" for name in "abc")
    write_json(first, rows, dtype="float32")
    write_json(second, rows[:1], dtype="bfloat16")
    write_json(third, rows[1:], dtype="bfloat16")
    assert main(["bench", "compare", str(first), str(second), "--json", "-"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["differences"] == ["dtype: float32, then bfloat16", "1 row only in the first file"]
    assert [(row["forward"], row["backward"]) for row in told["rows"]] == [("1.000", "1.000")]
    assert main(["bench", "compare", str(second), str(third)]) == 2
    assert "no row in common" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["compare", "a", "b", "--picture", "c.svg"], "bench compare has no such option; got --picture"),
        (["draw", "a", "--picture", "c.svg", "--json", "-"], "bench draw has no such option; got --json"),
        (["draw", "a", "--picture", "c.svg", "--markdown", "c.md"], "bench draw has no such option; got --markdown"),
    ],
)
def test_bench_of_files_rejects_other_options(words, error, capsys):
    assert main(["bench", *words]) == 2
    assert error in capsys.readouterr().err
