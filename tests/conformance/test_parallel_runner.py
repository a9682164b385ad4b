"""Test trials in several processes: equal results in equal order, and the report of a process that ends early."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from burst_portable.conformance import check_backend
from burst_portable.errors import InputError
from tests.support import planted_bugs
from tests.support.planted_bugs import KernelWrapper, Planted


class DiesOfSoftcap(KernelWrapper):
    """End the process, as a kernel's driver may."""

    def attend(self, q, k, v, tiles, call, *, state=None, yields_to_comm=False):
        if call.softcap is not None:
            os._exit(7)
        return super().attend(q, k, v, tiles, call, state=state)


class HangsInSoftcap(KernelWrapper):
    """Hang, as a kernel does that waits for a flag that is never set."""

    def attend(self, q, k, v, tiles, call, *, state=None, yields_to_comm=False):
        if call.softcap is not None:
            time.sleep(1000)
        return super().attend(q, k, v, tiles, call, state=state)


class FailsForGood(KernelWrapper):
    """Fail in every later call of the process, as CUDA does after an illegal address."""

    def __init__(self, kernel):
        super().__init__(kernel)
        self.broken = False

    def attend(self, q, k, v, tiles, call, *, state=None, yields_to_comm=False):
        self.broken |= call.softcap is not None
        if self.broken:
            raise RuntimeError("the device is gone")
        return super().attend(q, k, v, tiles, call, state=state)


@pytest.fixture(autouse=True)
def nobody_is_left():
    before = set(multiprocessing.active_children())  # pools of other tests, which remain
    yield
    assert set(multiprocessing.active_children()) <= before


def facts(report):
    return [(one.check, one.name, one.ok, one.errors, one.skipped, one.smallest) for one in report.results]


@pytest.mark.usefixtures("ranks_are_forked")
def test_two_processes_report_same_results():
    options = {"ranks": 3, "only": ["claims", "fully_masked"], "coverage": "quick"}
    several = check_backend("cpu", **options, processes=2)
    assert several.ok, several.markdown()
    assert facts(several) == facts(check_backend("cpu", **options))


@pytest.mark.usefixtures("ranks_are_forked")
@pytest.mark.parametrize(
    ("bug", "said"),
    [
        (DiesOfSoftcap, "its process ended with exit code 7"),
        pytest.param(FailsForGood, "the device is gone", marks=pytest.mark.full),
    ],
)
def test_trial_that_breaks_its_process_fails_alone(bug, said):
    """Two processes run, and both run further trials after it."""
    cases = ["sizes:softcap=5.0,batch=1", *(f"sizes:ranks=1,length={length}" for length in (5, 6, 7, 8, 9))]
    report = check_backend(Planted(bug), cases=cases, processes=2)
    assert [one.ok for one in report.results] == [False, True, True, True, True, True]
    assert said in report.results[0].message
    assert report.results[0].command == "burst-portable conform --backend planted --case " + report.results[0].smallest


@pytest.mark.full
def test_trial_that_never_ends_fails_alone():
    """The limit exceeds the time that a process takes to start here."""
    cases = ["sizes:softcap=5.0,batch=1", "sizes:ranks=1,length=5", "sizes:ranks=1,length=6"]
    report = check_backend(Planted(HangsInSoftcap), cases=cases, processes=2, test_timeout=20.0)
    assert [one.ok for one in report.results] == [False, True, True]
    assert report.results[0].message == "it did not end within 20 s, and its process was killed"


@pytest.mark.full
def test_fail_fast_stops_after_first_failure():
    cases = ["attention:mask=full,ranks=1", "attention:mask=window,ranks=1"] + ["attention:mask=full,ranks=4"] * 20
    report = check_backend(Planted(planted_bugs.BandOffByOne), cases=cases, processes=2, fail_fast=True)
    assert [one.ok for one in report.results] == [True, False]


@pytest.mark.parametrize("processes", [0, -1, 257, True, 1.5])
def test_check_backend_rejects_invalid_process_count(processes):
    with pytest.raises(InputError, match="processes must be"):
        check_backend("cpu", processes=processes)


LISTENING = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs of a shell ignore Ctrl-C
from burst_portable.cli import main
sys.argv = ["burst-portable", "conform", "--backend", "cpu", "--processes", "2"]
sys.exit(main())
"""


def test_interrupt_while_processes_start_ends_all():
    """All processes are importing torch; the first one ends the remaining ones and reports where it was."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen([sys.executable, "-c", LISTENING], start_new_session=True, **pipes)
    try:
        # including the helper process of multiprocessing
        while len(found := psutil.Process(process.pid).children()) < 3:
            assert process.poll() is None, process.communicate()
            time.sleep(0.02)
        time.sleep(0.3)
        for _ in range(2):
            os.killpg(process.pid, signal.SIGINT)
            time.sleep(0.05)
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert (process.returncode, out) == (128 + signal.SIGINT, "")
    assert err == "interrupted while testing claims:device\n"
    until = time.monotonic() + 5
    while any(map(_runs, found)):
        assert time.monotonic() < until
        time.sleep(0.05)


def _runs(process: psutil.Process) -> bool:
    """Return whether a process runs; one that has ended may stay as a zombie."""
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
