"""Test the clock of devices with streams on simulated events: order, late reads, reuse, long sessions."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch

from burst_portable.profiling import clocks
from burst_portable.profiling.clocks import DeviceClock, HostClock, make_clock, read_core_wait


class FakeEvent:
    """Simulate an event of a device with an idle stream. Elapsed times are float32 milliseconds, as on devices."""

    now = 0  # nanoseconds on the simulated device
    made = 0

    def __init__(self, *_: object, **__: object) -> None:
        FakeEvent.made += 1

    def record(self) -> None:
        self.time = FakeEvent.now

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, later: FakeEvent) -> float:
        return float(np.float32((later.time - self.time) / 1e6))


def test_core_wait_is_the_sum_over_threads(tmp_path):
    for thread, counts in (("1", "900 70 3"), ("2", "5 30 1")):
        (tmp_path / thread).mkdir()
        (tmp_path / thread / "schedstat").write_text(f"{counts}\n", encoding="ascii")
    (tmp_path / "3").mkdir()  # a thread that has just ended
    assert read_core_wait(str(tmp_path)) == 100
    assert read_core_wait(str(tmp_path / "3")) is None, "the system does not count"
    assert read_core_wait(str(tmp_path / "none")) is None


def clock_of_fakes(monkeypatch) -> DeviceClock:
    monkeypatch.setattr(clocks.torch, "Event", FakeEvent)
    FakeEvent.now = FakeEvent.made = 0
    return DeviceClock(torch.device("cpu"))


def test_device_clock_keeps_microseconds_for_ten_minutes(monkeypatch):
    """Float32 milliseconds from a single base would be wrong by 60 µs."""
    clock = clock_of_fakes(monkeypatch)
    marks = []
    for index in range(6000):
        FakeEvent.now = index * 100_000_000 + 137
        marks.append(clock.mark())
    first, *others = [clock.read(mark) for mark in marks]
    for index, time in enumerate(others, 1):
        assert abs(time - first - index * 100_000_000) < 15_000 * (1 + index / 512)
    assert clock.read(marks[-1]) == others[-1], "reading twice gives the same"


def test_late_host_shifts_device_clock_little(monkeypatch):
    """The host learns late that an event is over; the shortest of several waits counts."""
    host = {"now": 1_000_000_000}
    delays = iter([9_000_000, 7_000_000, 20_000, 12_000_000, 8_000_000])

    def synchronize(self):
        host["now"] += next(delays)

    monkeypatch.setattr(FakeEvent, "synchronize", synchronize)
    monkeypatch.setattr(clocks.time, "perf_counter_ns", lambda: host["now"])
    clock = clock_of_fakes(monkeypatch)
    assert abs(clock._start(clock._base) - (1_000_000_000 + 16_000_000)) <= 20_000


def drifting(monkeypatch, ppm: float, wait: int = 10_000):
    """Return a device clock that is slower than the host by `ppm` millionths, and the host's time, which tests may set.

    The wait for each anchor takes `wait` nanoseconds.
    """
    host = {"now": 5_000_000_000}
    begin = host["now"]

    def record(self):
        self.time = (host["now"] - begin) * (1 - ppm * 1e-6)

    def synchronize(self):
        host["now"] += wait

    monkeypatch.setattr(FakeEvent, "record", record)
    monkeypatch.setattr(FakeEvent, "synchronize", synchronize)
    monkeypatch.setattr(clocks.time, "perf_counter_ns", lambda: host["now"])
    return clock_of_fakes(monkeypatch), host


@pytest.mark.parametrize("ppm", [40.0, -15.0])
def test_device_clock_corrects_drift(ppm, monkeypatch):
    """40 ppm are 24 ms in ten minutes; anchor uncertainty and rounding remain."""
    clock, host = drifting(monkeypatch, ppm)
    marks = []
    for _ in range(6000):
        host["now"] += 100_000_000
        marks.append((host["now"], clock.mark()))
    drift = clock.end()
    assert drift.ppm == pytest.approx(ppm, abs=0.1)
    assert drift.corrected
    assert drift.uncertainty_ppm < 0.1
    assert max(abs(clock.read(mark) - at) for at, mark in marks) < 60_000


def test_device_clock_ignores_unmeasurable_drift(monkeypatch):
    """In 10 ms the wait for an anchor is 1,000 ppm."""
    clock, host = drifting(monkeypatch, 40.0)
    marks = [clock.mark()]
    host["now"] += 10_000_000
    marks.append(clock.mark())
    drift = clock.end()
    assert not drift.corrected
    assert abs(drift.ppm) < drift.uncertainty_ppm
    first, last = (clock.read(mark) for mark in marks)
    assert abs(last - first - 10_000_000 * (1 - 40e-6)) < 10


def test_device_clock_is_exact_between_neighbors(monkeypatch):
    clock = clock_of_fakes(monkeypatch)
    marks = []
    for index in range(2000):
        FakeEvent.now = index * 50_000
        marks.append(clock.mark())
    times = [clock.read(mark) for mark in marks]
    assert max(abs(b - a - 50_000) for a, b in pairwise(times)) < 4000
    assert times == sorted(times)


def test_device_clock_reuses_events(monkeypatch):
    clock = clock_of_fakes(monkeypatch)
    for _ in range(5):
        for mark in [clock.mark() for _ in range(10)]:
            clock.read(mark)
    assert FakeEvent.made <= 12


def test_arrival_is_watched_on_separate_stream(monkeypatch):
    """The compute stream never waits for it."""
    current = ["compute"]

    class FakeStream:
        def __init__(self, *_: object) -> None:
            self.waited: list[object] = []

        def wait_stream(self, other: object) -> None:
            self.waited.append(other)

        def __enter__(self) -> None:
            current.append("watcher")

        def __exit__(self, *_: object) -> None:
            current.pop()

    def wait() -> None:
        assert current[-1] == "watcher"
        FakeEvent.now = 7_000_000  # the event is complete when the transfer is over

    clock = clock_of_fakes(monkeypatch)
    monkeypatch.setattr(clocks.torch, "Stream", FakeStream)
    before = clock.mark()
    arrived = clock.arrival(wait)
    assert current == ["compute"]
    assert clock.read(arrived) - clock.read(before) == 7_000_000
    compute = FakeStream()
    monkeypatch.setattr(clocks.torch.accelerator, "current_stream", lambda device: compute)
    for _ in range(2):  # the watcher is waited for once
        clock.rejoin()
        assert compute.waited == [clock._watcher]


def test_host_clock_times_synchronous_device():
    clock = make_clock(torch.device("cpu"), streams=False)
    assert isinstance(clock, HostClock)
    assert clock.read(clock.mark()) <= clock.read(clock.mark())
