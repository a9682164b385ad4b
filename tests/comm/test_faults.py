"""Test transfers that never end, with simulated works and events; the tests of each transport cover the rest."""

from __future__ import annotations

import threading
import time
import weakref

import pytest
import torch

from burst_portable.comm.faults import TransferWatch
from burst_portable.errors import CommunicationTimeoutError
from burst_portable.utils.threads import Background


class Switch:
    """Simulate a work or an event."""

    def __init__(self, on=True):
        self.on = on

    def query(self):
        return self.on

    is_completed = query


class Settled:
    def __init__(self):
        self.buffers, self.happened = [], threading.Event()

    def __call__(self, incoming):
        self.buffers = list(incoming)
        self.happened.set()


def test_watch_names_and_settles_unfinished_transfer(capsys):
    settled = Settled()
    prepared = []
    watch = TransferWatch(0.2, settled, lambda: prepared.append(1))
    done = watch.add("rank 0, forward step 1: exchange with ranks [1]", [])
    done.works, done.ready = [Switch()], Switch()
    late = watch.add("rank 0, forward step 2: exchange with ranks [1]", [torch.zeros(1)])
    late.works, late.ready = [Switch(), Switch(False)], Switch()
    behind = watch.add("rank 0, forward step 3: exchange with ranks [1]", [torch.ones(1)])
    behind.works, behind.ready = [Switch(False)], Switch(False)
    assert settled.happened.wait(5)
    assert [float(x) for x in settled.buffers] == [0.0, 1.0]
    assert "forward step 2: exchange with ranks [1] took too long" in capsys.readouterr().err
    with pytest.raises(CommunicationTimeoutError, match="step 2"):
        watch.add("rank 0, forward step 4", [])
    assert prepared == [1]


def test_watch_ignores_transfers_that_device_has_not_reached():
    settled = Settled()
    watch = TransferWatch(0.1, settled)
    hop = watch.add("rank 0, backward step 1", [])
    reached = Switch(False)
    hop.works, hop.ready = [Switch(False)], reached
    assert not settled.happened.wait(0.5)
    reached.on = True
    assert settled.happened.wait(5)


def test_watch_reports_transfer_that_host_cannot_start():
    settled = Settled()
    watch = TransferWatch(0.1, settled)
    watch.add("rank 0, forward step 0: exchange with ranks [1]", [])  # never reported as started
    assert settled.happened.wait(5)


def test_watch_forgets_transfer_that_failed_at_once():
    settled = Settled()
    watch = TransferWatch(0.1, settled)
    watch.remove(watch.add("rank 0, forward step 0", []))
    time.sleep(0.4)
    assert watch.failed is None


def test_watch_releases_finished_transfer_at_next_start():
    """Waiting for its thread would retain buffers that are needed again."""
    watch = TransferWatch(60.0, print)
    freed = []
    for number in range(20):
        buffer = torch.zeros(1)
        weakref.finalize(buffer, freed.append, number)
        hop = watch.add(f"rank 0, forward step {number}", [buffer])
        hop.works, hop.ready = [Switch()], Switch()
        del buffer, hop
        assert freed == list(range(number))


def test_watch_thread_sleeps_and_wakes(monkeypatch):
    """Transfers started while it sleeps are watched, and wake it at most once per sleep."""
    settled, wake = Settled(), Background.wake
    watch = TransferWatch(1.0, settled)
    woken = []
    monkeypatch.setattr(Background, "wake", lambda self, owner: (woken.append(1), wake(self, owner)))
    for _ in range(3):
        done = Switch(False)  # not done until all are started; otherwise the thread might sleep between two of them
        for number in range(30):
            hop = watch.add(f"rank 0, forward step {number}", [])
            hop.works, hop.ready = [done], Switch()
        done.on = True
        time.sleep(0.5)
    assert len(woken) == 3
    late = watch.add("rank 0, forward step 30", [])
    late.works, late.ready = [Switch(False)], Switch()
    assert settled.happened.wait(5)
