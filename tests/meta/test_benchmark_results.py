"""Check that a page names each file in benchmarks/results, and that each named file exists."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"
PAGES = (
    ROOT / "README.md",
    ROOT / "benchmarks" / "README.md",
    ROOT / "profiling" / "README.md",
    *(ROOT / "docs").rglob("*.md"),
)


def tracked():
    """Return the names of committed result files, or all files outside a clone."""
    command = ["git", "ls-files", "benchmarks/results"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return {Path(line).name for line in done.stdout.split()} or {file.name for file in RESULTS.iterdir()}


def named():
    text = "\n".join(page.read_text(encoding="utf-8") for page in PAGES)
    return set(re.findall(r"results/([\w.-]+\.\w+)", text))


def test_pages_name_every_result_file():
    assert tracked() <= named()


def test_result_files_named_by_pages_exist():
    assert named() <= {file.name for file in RESULTS.iterdir()}


@pytest.mark.parametrize("file", sorted(RESULTS.iterdir()), ids=lambda file: file.name)
def test_result_file_names_have_date(file):
    assert re.fullmatch(r"[a-z0-9.-]+-20\d\d-\d\d-\d\d\.json", file.name)
