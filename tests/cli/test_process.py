"""Test Ctrl-C, SIGTERM and SIGHUP, also repeated: silent cleanup, and the exit code of the signal."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time

import pytest

from burst_portable.cli import main, process

ENDING = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]


@pytest.fixture(autouse=True)
def heard():
    """Set the default handlers of signals, which the parent of the tests may have disabled."""
    before = {number: signal.signal(number, signal.SIG_DFL) for number in ENDING}
    signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def run(work) -> int:
    """Run a function as the command `work`; return the exit code."""
    return main(["work"], {"work": work})


@pytest.mark.parametrize("number", ENDING, ids=lambda number: number.name)
def test_cleanup_completes_despite_repeated_signals(capsys, tmp_path, number):
    before, gone_on = [signal.getsignal(each) for each in ENDING], []

    def work() -> None:
        with tempfile.TemporaryDirectory(dir=tmp_path):
            try:
                os.kill(os.getpid(), number)
                signal.pause()
            finally:
                for each in ENDING:
                    os.kill(os.getpid(), each)
                gone_on.append(number)

    assert run(work) == 128 + number
    assert gone_on == [number]
    assert list(tmp_path.iterdir()) == []
    assert [signal.getsignal(each) for each in ENDING] == before
    captured = capsys.readouterr()
    assert captured.out + captured.err == ""


def test_second_signal_interrupts_cleanup():
    gone_on = []

    def work() -> None:
        try:
            os.kill(os.getpid(), signal.SIGINT)
        finally:
            os.kill(os.getpid(), signal.SIGTERM)
            gone_on.append(True)

    with pytest.raises(process.Ended) as ended, process.ended_by_signals(last=False, interval=0.0):
        work()
    assert ended.value.number == signal.SIGTERM
    assert not gone_on


def test_signal_ignored_by_nohup_stays_ignored():
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    assert run(lambda: os.kill(os.getpid(), signal.SIGHUP)) == 0
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN


class Deaf:
    """Send a signal in `__del__`, where Python drops exceptions."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __del__(self) -> None:
        os.kill(os.getpid(), self.number)


@pytest.mark.parametrize("number", ENDING, ids=lambda number: number.name)
def test_signal_during_unraisable_exception_ends_process(capsys, number):
    """Python drops exceptions raised in `__del__`; the signal still ends the process."""
    taken_back, hook = [], sys.unraisablehook

    def work() -> None:
        try:
            for _ in range(3):
                Deaf(number)
            time.sleep(20)
        finally:
            taken_back.append(number)

    begun = time.monotonic()
    assert run(work) == 128 + number
    assert time.monotonic() - begun < 10
    assert taken_back == [number]
    assert sys.unraisablehook is hook
    captured = capsys.readouterr()
    assert captured.out + captured.err == ""


def test_signal_during_slow_unraisable_hook_ends_process(monkeypatch, capsys):
    """The timer repeats the signal while Python still reports the last exception."""

    class Slow(threading.Timer):
        def start(self) -> None:
            super().start()
            time.sleep(0.1)

    monkeypatch.setattr(process.threading, "Timer", Slow)

    def work() -> None:
        Deaf(signal.SIGTERM)
        time.sleep(5)

    assert run(work) == 128 + signal.SIGTERM
    captured = capsys.readouterr()
    assert captured.out + captured.err == ""


def test_other_unraisable_exceptions_are_reported(monkeypatch):
    told = []
    monkeypatch.setattr(sys, "unraisablehook", lambda one: told.append(type(one.exc_value)))

    class Broken:
        def __del__(self) -> None:
            raise ValueError

    assert run(lambda: Broken() and None) == 0
    assert told == [ValueError]


SLOW_TO_END = """
import atexit, signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # shells start background jobs with Ctrl-C ignored
from burst_portable.cli import main

def work():
    try:
        print("begun", flush=True)
        time.sleep(60)
    finally:
        time.sleep(0.3)
        print("taken back", flush=True)

atexit.register(time.sleep, 0.3)
sys.argv = ["burst-portable", "work"]
sys.exit(main(commands={"work": work}))
"""


def test_repeated_interrupts_do_not_break_cleanup():
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    command = subprocess.Popen([sys.executable, "-c", SLOW_TO_END], **pipes)
    try:
        assert command.stdout.readline() == "begun\n"
        asking = threading.Thread(target=_ask, args=(command,))
        asking.start()
        out, err = command.communicate(timeout=60)
        asking.join()
    finally:
        command.kill()
    assert (command.returncode, out, err) == (128 + signal.SIGINT, "taken back\n", "")


def _ask(command: subprocess.Popen[str]) -> None:
    """Send Ctrl-C every hundredth of a second."""
    while command.poll() is None:
        command.send_signal(signal.SIGINT)
        time.sleep(0.01)
