"""Trials in several processes: the same results in the same order, and what becomes of a process that dies."""

from __future__ import annotations

import multiprocessing
import os

import pytest

from burst_portable.conformance import check_backend
from burst_portable.errors import InputError
from tests.conformance import planted
from tests.conformance.planted import Around, Planted


class DiesOfSoftcap(Around):
    """As a kernel's driver may, it takes the process with it."""

    def attend(self, q, k, v, tiles, options, *, state=None):
        if options.softcap is not None:
            os._exit(7)
        return super().attend(q, k, v, tiles, options, state=state)


class FailsForGood(Around):
    """As CUDA after an illegal address: the process's every later call fails too."""

    def __init__(self, kernel):
        super().__init__(kernel)
        self.broken = False

    def attend(self, q, k, v, tiles, options, *, state=None):
        self.broken |= options.softcap is not None
        if self.broken:
            raise RuntimeError("the device is gone")
        return super().attend(q, k, v, tiles, options, state=state)


@pytest.fixture(autouse=True)
def nobody_is_left():
    before = set(multiprocessing.active_children())  # other tests' pools, which stay
    yield
    assert set(multiprocessing.active_children()) <= before


def facts(report):
    return [(one.check, one.name, one.ok, one.errors, one.skipped, one.smallest) for one in report.results]


def test_the_same_as_one_after_the_other():
    options = {"ranks": 3, "only": ["claims", "blind"], "effort": "quick"}
    several = check_backend("cpu", **options, processes=2)
    assert several.ok, several.markdown()
    assert facts(several) == facts(check_backend("cpu", **options))


@pytest.mark.parametrize(
    ("bug", "said"),
    [
        (DiesOfSoftcap, "its process ended with exit code 7"),
        pytest.param(FailsForGood, "the device is gone", marks=pytest.mark.full),
    ],
)
def test_a_trial_that_breaks_its_process_fails_alone(bug, said):
    """In two processes, so that both are asked again after it."""
    cases = ["sizes:softcap=5.0,batch=1", *(f"sizes:ranks=1,length={length}" for length in (5, 6, 7, 8, 9))]
    report = check_backend(Planted(bug), cases=cases, processes=2)
    assert [one.ok for one in report.results] == [False, True, True, True, True, True]
    assert said in report.results[0].message
    assert report.results[0].command == "burst-portable conform --backend planted --case " + report.results[0].smallest


@pytest.mark.full
def test_the_first_failure_ends_it():
    cases = ["attention:mask=full,ranks=1", "attention:mask=window,ranks=1"] + ["attention:mask=full,ranks=4"] * 20
    report = check_backend(Planted(planted.BandOffByOne), cases=cases, processes=2, fail_fast=True)
    assert [one.ok for one in report.results] == [True, False]


@pytest.mark.parametrize("processes", [0, -1, 257, True, 1.5])
def test_what_is_no_number_of_processes_is_refused(processes):
    with pytest.raises(InputError, match="processes must be"):
        check_backend("cpu", processes=processes)
