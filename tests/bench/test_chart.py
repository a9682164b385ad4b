"""Test the picture of a benchmark."""

from __future__ import annotations

import json
import re
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

import pytest

from burst_portable.bench.chart import draw
from burst_portable.bench.masks import MASKS
from burst_portable.cli import main

ROOT = Path(__file__).parents[2]
MEASURED = ROOT / "benchmarks" / "results" / "bench-h200x2-2026-11-29.json"
SETTINGS = {"version": "1", "backend": "cpu", "heads": 4, "kv_heads": 2, "head_dim": 8, "rounds": 3,
            "dtype": "float32", "layout": "zigzag", "device": "a & b", "versions": {"torch": "9"}}  # fmt: skip


def row(entry, status="ok", mask="causal", speed=0.004):
    base = {"mask": mask, "seq_len": 64, "ranks": 2, "kernel": "auto", "entry": entry, "status": status}
    return base if status != "ok" else {**base, "forward_tflops": speed, "backward_tflops": speed / 2}


def test_draw_has_proportional_bars_and_none_for_wrong_entries():
    rows = [row("ring"), row("burst", speed=0.001), row("yunchang", "wrong"), row("usp", "refused")]
    image = draw(SETTINGS, rows)
    ElementTree.fromstring(image)
    bars = {
        title: float(height) for height, title in re.findall(r'height="([\d.]+)" fill="#\w+"><title>([^<]+)', image)
    }
    assert list(bars) == ["ring, causal: 4 GFLOP/s", "burst, causal: 1 GFLOP/s", "ring, causal: 2 GFLOP/s",
                          "burst, causal: 0.5 GFLOP/s"]  # fmt: skip
    assert bars["ring, causal: 4 GFLOP/s"] == pytest.approx(4 * bars["burst, causal: 1 GFLOP/s"], rel=0.01)
    assert image.count(">x</text>") == 2
    assert ">usp</text>" not in image
    assert "2 ranks on a &amp; b; 64 tokens, 4 query and 2 K/V heads, head size 8, float32; zigzag layout" in image
    assert "burst-portable 1; torch 9" in image
    assert "No bar: not supported. x: wrong or failed." in image


def test_draw_separates_words_below_groups_of_all_masks():
    rows = [row("ring", mask=name) for name in MASKS]
    image = draw(SETTINGS, rows)
    lines = {}
    for x, y, word in re.findall(r'x="([\d.]+)" y="([\d.]+)" text-anchor="middle"[^>]*>(\w+)<', image):
        lines.setdefault(y, []).append((float(x), len(word)))
    assert sum(map(len, lines.values())) == sum(len(name.split("_")) for name in MASKS)
    character = 0.55 * 17  # pixels; the mean of `document` in Helvetica
    for words in lines.values():
        for (left, first), (right, second) in pairwise(sorted(words)):
            assert right - left > character * (first + second) / 2 + 4
    width, right = (float(re.search(pattern, image)[1]) for pattern in (r'width="(\d+)"', r"H([\d.]+)\""))
    assert right < width


def test_picture_of_docs_has_numbers_of_its_file(tmp_path):
    assert main(["bench", "draw", str(MEASURED), "--picture", str(tmp_path / "made.svg")]) == 0
    drawn = (ROOT / "docs" / "images" / "bench.svg").read_text()
    assert (tmp_path / "made.svg").read_text() == drawn
    best = max(one["forward_tflops"] for one in json.loads(MEASURED.read_text())["rows"] if one["status"] == "ok")
    assert f"{best:.3g} TFLOP/s</title>" in drawn


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["draw", str(MEASURED)], "--picture FILE.svg"),
        (["draw"], "draw A.json --picture A.svg"),
        (["draw", "README.md", "--picture", "x.svg"], "README.md is no file of a benchmark"),
        (["compare", str(MEASURED)], "compare A.json B.json"),
    ],
)
def test_bench_refuses_wrong_words_in_a_line(words, error, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    assert main(["bench", *words]) == 2
    assert error in capsys.readouterr().err


def test_bench_draw_refuses_file_without_rows(tmp_path, capsys):
    made = json.loads(MEASURED.read_text())
    file = tmp_path / "rows.json"
    file.write_text(json.dumps(made | {"rows": []}))
    assert main(["bench", "draw", str(file), "--picture", str(tmp_path / "x.svg")]) == 2
    assert f"{file} has no rows to draw" in capsys.readouterr().err


@pytest.mark.parametrize("speed", [-3.0, 0, "fast", float("nan")])
def test_bench_draw_refuses_speed_that_is_no_positive_number(speed, tmp_path, capsys):
    made = json.loads(MEASURED.read_text())
    next(row for row in made["rows"] if row["status"] == "ok")["forward_tflops"] = speed
    file = tmp_path / "rows.json"
    file.write_text(json.dumps(made))
    assert main(["bench", "draw", str(file), "--picture", str(tmp_path / "x.svg")]) == 2
    assert f"forward_tflops of row 1 is {speed!r}, not a positive number" in capsys.readouterr().err


def test_every_entry_of_the_largest_benchmark_has_another_color(tmp_path):
    """The file has fifteen entries: with fourteen colors, `yunchang` had that of `ring`."""
    assert main(["bench", "draw", str(MEASURED), "--picture", str(tmp_path / "made.svg")]) == 0
    legend = re.findall(r'width="16" height="16" fill="(#\w+)"', (tmp_path / "made.svg").read_text())
    assert len(set(legend)) == len(legend) == 15
