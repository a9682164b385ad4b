"""Test the marks of a recorded call: around copies, not around posts, and one for each batch of messages."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from types import SimpleNamespace

import torch

import burst_portable as bp
from burst_portable.backends.selection import load
from burst_portable.comm.agreement import call_signature
from burst_portable.comm.local import Fabric, LocalTransport
from burst_portable.kernels.reference import ReferenceKernel
from burst_portable.profiling.event_tables import NEVER
from burst_portable.profiling.recorder import Recorder
from burst_portable.profiling.recording_observer import RecordingObserver
from burst_portable.profiling.recording_transport import RecordingTransport
from burst_portable.runtime.prepare import prepared_call
from tests.support.recorded_calls import recorded


def test_posting_an_exchange_is_not_recorded_as_copy(monkeypatch):
    """Marks of copies surround the copies of a rank and not its posts."""
    inside, posted = threading.local(), []
    copying, post = RecordingObserver.copies, LocalTransport.post

    @contextmanager
    def marked(self, *arguments, **options):
        inside.now = True
        with copying(self, *arguments, **options):
            yield
        inside.now = False

    def watched(self, sends, receives, label=""):
        posted.append(label)
        assert not getattr(inside, "now", False), label
        return post(self, sends, receives, label)

    monkeypatch.setattr(RecordingObserver, "copies", marked)
    monkeypatch.setattr(LocalTransport, "post", watched)
    recorded("ulysses")
    assert {"to heads", "to sequence"} <= set(posted)


class Arrived:
    def wait(self):
        """Return at once."""


def test_batched_messages_are_watched_once():
    plan = bp.plan(seq_len=64, ranks=2, heads=1, head_dim=16, mask="full", layout="contiguous", strategy="ring")
    step = plan.forward.steps_of(0)[0]
    buffer, log = torch.empty(8, dtype=torch.uint8), []
    batch, apart = Arrived(), Arrived()
    clock = SimpleNamespace(
        mark=lambda: 1, arrival=lambda wait: log.append(wait) or 5, rejoin=lambda: log.append("over")
    )

    def arrivals(sending):
        transport = LocalTransport(Fabric(2, 1.0), 0)
        transport.end = lambda: log.append("end")
        prepared = prepared_call(plan, load("cpu"), ReferenceKernel(), transport, call_signature({"call": "test"}))
        recorder = Recorder(0, "host", level="standard")
        recorder._clocks[buffer.device] = clock
        observer = RecordingObserver(prepared, recorder)
        sends, receives = [(step.sends[0], buffer)], [(step.receives[0], buffer)]
        with observer.posts(sends, receives, 0, backward=False) as posting:
            leaving, arriving = [sending], [batch]
        leaving, arriving = posting.wrap(leaving, arriving)
        for handle in (*leaving, *arriving):
            handle.wait()
        RecordingTransport(transport, observer).end()
        table = recorder.records().tables["message"]
        return dict(zip(table["sends"].tolist(), table["arrived"].tolist(), strict=True))

    assert arrivals(batch) == {1: 5, 0: 5}
    assert arrivals(apart) == {1: NEVER, 0: 5}
    assert log == [batch.wait, "over", "end"] * 2, "the pass waits for those who watch, before it is over"
