"""A file does one thing: one of more than 400 lines is a question, which CONTRIBUTING.md asks and this test too."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("backends", "benchmarks", "burst_portable", "ci", "examples", "tests")
MOST = 400


def test_no_file_is_too_long():
    lengths = {
        str(file.relative_to(ROOT)): len(file.read_text(encoding="utf-8").splitlines())
        for folder in FOLDERS
        for file in (ROOT / folder).rglob("*.py")
    }
    assert len(lengths) > 400, "files are where this test looks for them"
    assert {name: length for name, length in lengths.items() if length > MOST} == {}
