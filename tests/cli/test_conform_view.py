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
            told(done, 4, make_test("one"), Result("kernels", "one", ok, message="" if ok else "dq has an error of 2"))
    assert capsys.readouterr().err.splitlines() == [
        "failed kernels:one: dq has an error of 2",
        "kernels: 2 of 4 checks are done, 1 of kernels failed",
        "kernels: 4 checks in 80.0 s, 1 failed",
    ]


@pytest.mark.parametrize(("done", "found"), [(0, ""), (1, ", after 1 of 9 checks, of which none failed")])
def test_interrupted_conform_lists_findings(done, found, capsys):
    with pytest.raises(KeyboardInterrupt):
        _interrupted(done)
    name = "two" if done else "one"
    assert capsys.readouterr().err == f"interrupted while testing kernels:{name}{found}\n"


def test_first_failures_are_printed_before_an_interruption(capsys):
    with pytest.raises(KeyboardInterrupt):
        _interrupted_after_failures()
    *failures, last = capsys.readouterr().err.splitlines()
    numbers = (*range(1, 21, 2), 21, 22)  # the first 12
    assert failures == [f"failed kernels:test {number}: wrong" for number in numbers]
    assert last == "interrupted while testing kernels:test 26, after 26 of 30 checks, of which 16 failed"


def _interrupted_after_failures():
    with conform_view.progress() as told:
        for done in range(1, 27):
            ok = done <= 20 and done % 2 == 0
            told(done, 30, make_test(f"test {done}"), Result("kernels", f"test {done}", ok, message="wrong"))
        raise KeyboardInterrupt


def _interrupted(done):
    with conform_view.progress() as told:
        told(0, 9, make_test("one"), None)
        if done:
            told(done, 9, make_test("one"), Result("kernels", "one", True))
            told(done, 9, make_test("two"), None)
        raise KeyboardInterrupt
