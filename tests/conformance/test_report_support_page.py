"""Test the page of supported vendors, which a script makes from the conformance reports."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


# ------------------------------------------------------------------------------------------------ the support page


def make_support():
    spec = importlib.util.spec_from_file_location("make_support", ROOT / "ci" / "make_support.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_support_page_matches_reports():
    script = make_support()
    assert script.main(["--check"]) == 0
    assert (ROOT / "docs" / "support.md").read_text() == script.page(script.vendors(ROOT))


def test_vendors_ignores_pycache(tmp_path):
    for name in ("cpu", "__pycache__"):
        (tmp_path / "backends" / name).mkdir(parents=True)
    assert make_support().vendors(tmp_path) == {"cpu": {}}


def test_support_page_marks_vendor_without_report_untested(failed):
    script = make_support()
    page = script.page({"new": {}, "bad": {"x.json": failed}})
    row = next(line for line in page.splitlines() if line.startswith("| [new]"))
    assert row.count("untested") == 5
    assert "**FAILED**" in page
    assert "| **FAILED** (only attention) 20" in script.page({"bad": {"x.json": replace(failed, only=("attention",))}})
