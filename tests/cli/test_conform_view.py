"""Test the progress of `burst-portable conform` in a log."""

from __future__ import annotations

import pytest

from burst_portable.cli import conform_view
from burst_portable.conformance.base import Outcome, TestCase
from burst_portable.conformance.report import Result


def make_test(name):
    return TestCase("kernels", name, lambda case: Outcome())


def test_progress_reports_long_group(monkeypatch, capsys):
    now = [0.0]
    monkeypatch.setattr(conform_view.time, "monotonic", lambda: now[0])
    with conform_view.progress() as told:
        told(0, 4, make_test("one"), None)
        for done, ok in enumerate((True, False, True, True), 1):
            now[0] += 20
            told(done, 4, make_test("one"), Result("kernels", "one", ok))
    assert capsys.readouterr().err.splitlines() == [
        "kernels: 2 of 4 checks are done, 1 of kernels failed",
        "kernels: 4 checks in 80.0 s, 1 failed",
    ]


@pytest.mark.parametrize(("done", "found"), [(0, ""), (1, ", after 1 of 9 checks, of which none failed")])
def test_interrupted_conform_lists_findings(done, found, capsys):
    with pytest.raises(KeyboardInterrupt):
        _interrupted(done)
    name = "two" if done else "one"
    assert capsys.readouterr().err == f"interrupted while testing kernels:{name}{found}\n"


def _interrupted(done):
    with conform_view.progress() as told:
        told(0, 9, make_test("one"), None)
        if done:
            told(done, 9, make_test("one"), Result("kernels", "one", True))
            told(done, 9, make_test("two"), None)
        raise KeyboardInterrupt
