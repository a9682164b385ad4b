"""Test the watch over peer copies with simulated devices: which messages count as late, and the reaction."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace

import pytest

from burst_portable.backends.cuda.peers import watch as peer_watch
from burst_portable.backends.cuda.peers.watch import QUIET, Watch, WatchedPass
from burst_portable.comm.peer_copy import MARKS
from burst_portable.errors import CommunicationTimeoutError, MismatchError

ENTERED, PASS, CALL = 0, 7 << 16, 0xAB


class Device:
    """Simulate the flags of a device, and the event at the end of a pass: it has happened when all flags are set."""

    def __init__(self, flags):
        self.flags, self.released = flags, []

    def read(self):
        return list(self.flags)

    def release(self, missing):
        self.released.append(missing)
        for flag, mark in missing:
            self.flags[flag] = mark

    def ended(self, expected):
        return Event(lambda: all(self.flags[flag] == mark for flag, mark, _ in expected))


class Event:
    def __init__(self, happened):
        self.query = happened


def watch_flags(device, timeout, marks, quiet=QUIET, read=None):
    """Return a watch, and its only pass, which waits for the given flags."""
    watch = Watch(None, timeout, read or device.read, device.release, quiet=quiet)
    expected = [
        (flag, mark, lambda flag=flag: f"rank 0, step {flag}: rank {flag} has not sent") for flag, mark in marks
    ]
    one = WatchedPass(Event(lambda: True), device.ended(expected), expected)
    watch._passes.append(one)
    pause(watch, time.sleep)
    return watch, one


def pause(watch, sleep):
    """Run the loop of the watch in the test. `Background.pause` returns whether to continue."""
    watch._thread = SimpleNamespace(pause=lambda seconds: sleep(seconds) is None)


def test_watch_reports_missing_message_and_releases_passes(capsys):
    device = Device([PASS | CALL, 0, 0])
    watch, one = watch_flags(device, 0.1, [(0, PASS | CALL), (2, PASS | CALL)])
    later = WatchedPass(Event(lambda: True), device.ended([(1, 8 << 16, None)]), [(1, 8 << 16, None)])
    watch._passes.append(later)  # added before the watch notices the error
    watch._watch_pass(one)
    assert isinstance(watch.failed, CommunicationTimeoutError)
    assert "rank 0, step 2: rank 2 has not sent in 0.1 s" in str(watch.failed)
    assert "rank 2 has not sent" in capsys.readouterr().err
    assert one.over()
    assert later.over(), "streams that wait behind it run out as well"


def test_watch_releases_pass_that_host_has_not_finished(monkeypatch):
    """Later waits of the pass are released and its end is no error; the next pass raises."""
    device, happened = Device([0, 0]), [True]
    event = SimpleNamespace(record=lambda stream: None, query=lambda: happened[0])
    monkeypatch.setattr(peer_watch.torch.cuda, "Event", lambda: event)
    watch = Watch(None, 0.1, device.read, device.release)
    watch._thread = SimpleNamespace(wake=lambda owner: None)
    watch.begin(None)
    one = watch._passes[0]
    watch.expect([0], PASS | CALL, lambda flag: f"rank {flag} has not sent")

    def sleep(seconds):
        time.sleep(seconds)
        if device.released and one.left is None:
            watch.expect([1], PASS | CALL, lambda flag: f"rank {flag} has not sent")
            happened[0] = False
            watch.end(None)
        happened[0] = device.flags == [PASS | CALL] * 2

    pause(watch, sleep)
    watch._watch_pass(one)
    assert "rank 0 has not sent" in str(watch.failed)
    assert one.over(), "nothing waits for what is not going to come"


def test_watch_reports_message_of_other_call_at_once(capsys):
    device = Device([PASS | 0xCD])
    watch, one = watch_flags(device, 600.0, [(0, PASS | CALL)])
    watch._watch_pass(one)
    assert isinstance(watch.failed, MismatchError)
    assert "another call" in capsys.readouterr().err


@pytest.mark.parametrize(("mine", "next_"), [(7, 8), (MARKS - 1, 1)])
def test_watch_does_not_report_peer_in_next_pass_as_late(mine, next_, capsys):
    """Rank 0 has entered the next pass, so the error names rank 1."""
    device = Device([next_ << 16 | CALL, (mine - 1) << 16 | CALL])
    watch, one = watch_flags(device, 0.1, [(0, mine << 16 | CALL), (1, mine << 16 | CALL)])
    watch._watch_pass(one)
    assert "rank 1 has not sent" in str(watch.failed)


@pytest.mark.parametrize("left_over", [0, 6 << 16 | CALL])
def test_watch_accepts_slow_messages_within_timeout(left_over, monkeypatch):
    """Each arrives within the timeout of the one before; flags of an earlier pass are valid."""
    device = Device([left_over] * 4)
    watch, one = watch_flags(device, 0.4, [(flag, PASS | CALL) for flag in range(4)])
    now = 0.0

    def sleep(seconds):
        nonlocal now
        now += seconds
        device.flags[: int(now / 0.2)] = [PASS | CALL] * min(4, int(now / 0.2))

    monkeypatch.setattr(peer_watch, "time", SimpleNamespace(monotonic=lambda: now))
    pause(watch, sleep)
    watch._watch_pass(one)
    assert watch.failed is None
    assert device.released == []
    assert now > 0.4, "longer than the timeout in all"
    assert len(device.flags) == 4


@pytest.mark.parametrize("forgotten", [False, True])
def test_watch_ignores_flags_after_end_of_pass(forgotten):
    """The pass ends unobserved; then memory grows and its numbers restart with another call."""
    device = Device([0])
    reads = []

    def read():
        reads.append(True)
        return list(device.flags)

    watch, one = watch_flags(device, 600.0, [(0, PASS | CALL)], quiet=0.0, read=read)

    def sleep(seconds):
        device.flags[0] = PASS | CALL
        assert one.over()
        one.left = Event(lambda: True)  # the event stays complete, as real ones do
        if forgotten:
            watch.forget()
        device.flags[0] = PASS | 0xCD

    pause(watch, sleep)
    watch._watch_pass(one)
    assert watch.failed is None
    assert not reads, "its memory may be gone"


def test_forget_waits_while_watch_reads_flags():
    """Memory is released only after the watch has stopped reading it."""
    device = Device([0])
    order = []

    def give_up():
        watch.forget()
        order.append("given up")

    giving = threading.Thread(target=give_up)

    def read():
        giving.start()
        time.sleep(0.05)
        order.append("read")
        return list(device.flags)

    watch, one = watch_flags(device, 600.0, [(0, PASS | CALL)], quiet=0.0, read=read)
    watch._watch_pass(one)
    giving.join(5)
    assert order == ["read", "given up"]
    assert watch.failed is None
    assert not watch._passes
