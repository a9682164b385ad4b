"""Define the clocks of the profiler, and the sampling of device sensors.

A mark is taken at the start or end of an event and read as nanoseconds after the session. On the CPU, work is done when
a call returns, so marks are times of the host's monotonic clock. On a device with streams, a mark is an event on the
current stream: recording it takes microseconds and waits for nothing.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import torch

from burst_portable.backends.base import Meter
from burst_portable.profiling.event_tables import NEVER
from burst_portable.utils.threads import Background

_ANCHORS = 5  # at each end of a session: the one with the shortest wait is kept
_BASE_EVERY = 512  # marks: elapsed times are 32-bit milliseconds, exact to a microsecond only for a few seconds


def read_core_wait(folder: str = "/proc/self/task") -> int | None:
    """Return the nanoseconds in which threads of this process could run and had no core; None if it is unknown.

    Linux counts them for each thread, in the second number of `schedstat`.
    """
    total = None
    for thread in os.listdir(folder) if os.path.isdir(folder) else ():
        try:
            with open(f"{folder}/{thread}/schedstat", "rb", buffering=0) as file:
                total = (total or 0) + int(file.read(64).split()[1])
        except OSError:
            continue  # the thread has just ended, or the system does not count
    return total


@dataclass(frozen=True)
class Drift:
    """Difference in rate between a device's clock and the host's, between the anchors of a session.

    Attributes:
        ppm: Drift in millionths; positive if the device's clock is slower.
        uncertainty_ppm: Uncertainty of the drift: the time of the anchors over the time between them.
        corrected: Whether marks are stretched to the host's clock. True if the drift exceeds the uncertainty.
    """

    ppm: float
    uncertainty_ppm: float
    corrected: bool


class HostClock:
    """Clock of devices whose work is done when a call returns. The clocks of other devices derive from it."""

    evidence = "host clock"
    """The source of its times, for reports."""

    mark: Callable[..., Any] = staticmethod(time.perf_counter_ns)
    """Mark the current position of the current stream, without waiting for it."""

    def arrival(self, wait: Callable[[], None]) -> Any:
        """Mark the end of a concurrent operation without blocking the current stream; `NEVER` if not possible."""
        return NEVER  # the host has no second stream that could record arrivals

    def rejoin(self) -> None:
        """Let the current stream continue only after all operations that were passed to `arrival`."""

    def end(self) -> Drift | None:
        """Wait for the device after the last mark. Return the drift of its clock; None for the host's clock."""
        return None

    def read(self, mark: Any) -> int:
        """Return a mark in nanoseconds of the host's monotonic clock. May wait for the device."""
        return int(mark)


class DeviceMark:
    """A position in a stream: an event until it is read, then a number. Several rows may share a mark."""

    __slots__ = ("base", "event", "time")

    def __init__(self, base: torch.Event, event: torch.Event) -> None:
        self.base = base
        self.event: torch.Event | None = event
        self.time = NEVER


class DeviceClock(HostClock):
    """Clock of devices with streams: events from a pool, anchored to the host's clock at both ends of a session.

    An anchor is an event that the host waited for. The rates of the two clocks differ by some millionths, which is
    milliseconds per hour, so times between the anchors are interpolated.
    """

    evidence = "device events"

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool: list[torch.Event] = []
        self._marks = 0
        self._base, self._first, self._took = self._best_anchor()
        self._stretch = 0.0  # additional nanoseconds of the host per nanosecond of the device
        self._offset: dict[int, int] = {id(self._base): self._first}
        self._before: dict[int, torch.Event] = {}  # previous base of each base
        self._kept = [self._base]  # all bases, so that no id is reused
        self._watcher: torch.Stream | None = None
        self._must_rejoin = False  # the watcher has work that no other stream waited for

    def _best_anchor(self) -> tuple[torch.Event, int, int]:
        best, *rest = sorted((self._anchor() for _ in range(_ANCHORS)), key=lambda anchor: anchor[2])
        self._pool += [event for event, *_ in rest]
        return best

    def _anchor(self) -> tuple[torch.Event, int, int]:
        """Return an event, the host's time at the middle of the wait for it, and the length of the wait."""
        event, began = self._event(), time.perf_counter_ns()
        event.record()
        event.synchronize()
        took = time.perf_counter_ns() - began
        return event, began + took // 2, took

    def _event(self) -> torch.Event:
        return self._pool.pop() if self._pool else torch.Event(self._device, enable_timing=True)

    def mark(self) -> DeviceMark:
        self._marks += 1
        if self._marks % _BASE_EVERY == 0:
            before, self._base = self._base, self._event()
            self._base.record()
            self._before[id(self._base)] = before
            self._kept.append(self._base)
        event = self._event()
        event.record()
        return DeviceMark(self._base, event)

    def arrival(self, wait: Callable[[], None]) -> DeviceMark:
        if self._watcher is None:
            self._watcher = torch.Stream(self._device)
        with self._watcher:  # the watcher waits; the rank's own stream continues
            wait()
            event = self._event()
            event.record()
            self._must_rejoin = True
        return DeviceMark(self._base, event)

    def rejoin(self) -> None:
        if self._watcher is not None and self._must_rejoin:
            torch.accelerator.current_stream(self._device).wait_stream(self._watcher)
            self._must_rejoin = False

    def end(self) -> Drift:
        event, until, took = self._best_anchor()
        reached = self._at(self._base, event)
        self._pool.append(event)
        span, uncertainty = max(1, reached - self._first), (self._took + took) // 2
        corrected = abs(until - reached) > uncertainty
        self._stretch = (until - reached) / span if corrected else 0.0
        return Drift(1e6 * (until - reached) / span, 1e6 * uncertainty / span, corrected)

    def read(self, mark: DeviceMark) -> int:
        if (event := mark.event) is not None:
            event.synchronize()
            reached = self._at(mark.base, event)
            mark.time = reached + round((reached - self._first) * self._stretch)
            self._pool.append(event)
            mark.event = None
        return mark.time

    def _at(self, base: torch.Event, event: torch.Event) -> int:
        """Return the time of an event by the device's clock, counted from the first anchor."""
        return self._start(base) + round(base.elapsed_time(event) * 1e6)

    def _start(self, base: torch.Event) -> int:
        """Return the time of a base: the sum of the times between consecutive bases."""
        path = []
        while id(base) not in self._offset:
            path.append(base)
            base = self._before[id(base)]
        for following in reversed(path):
            following.synchronize()
            self._offset[id(following)] = self._offset[id(base)] + round(base.elapsed_time(following) * 1e6)
            base = following
        return self._offset[id(base)]


def make_clock(device: torch.device, *, streams: bool) -> HostClock:
    """Return the clock of a device; `streams` is the capability of its backend."""
    return DeviceClock(device) if streams else HostClock()


NAMES = ("watts", "megahertz", "celsius", "joules")
_EVERY = 0.1  # seconds between samples
_MAX_SAMPLES = 3000  # the latest five minutes


class Sensors:
    """Sample the sensors of one device ten times per second, in a thread."""

    def __init__(self, meter: Meter | str) -> None:
        self.reason = meter if isinstance(meter, str) else ""  # why there are no samples
        self._rows: deque[tuple[int, dict[str, float]]] = deque(maxlen=_MAX_SAMPLES)
        self._thread: Background[Sensors] | None = None
        if not isinstance(meter, str):
            self._meter = meter
            self._thread = Background(self, Sensors._watch, "burst_portable sensors")
            self._thread.wake(self)

    def stop(self) -> None:
        """Stop sampling."""
        if self._thread is not None:
            self._thread.stop()

    def _watch(self) -> None:
        meter, thread = self._meter, self._thread
        assert thread is not None, "this runs in the thread"
        try:
            while True:
                self._rows.append((time.perf_counter_ns(), meter.read()))
                if not thread.pause(_EVERY):
                    return
        finally:
            meter.close()

    def facts(self) -> dict[str, Any]:
        """Return columns: `time_ns` of the host's clock, and one list per available sensor."""
        rows = list(self._rows)
        names = [name for name in NAMES if rows and all(name in values for _, values in rows)]
        columns = {name: [values[name] for _, values in rows] for name in names}
        return {"reason": self.reason, "time_ns": [at for at, _ in rows], **columns}


def sensor_text(one: dict[str, Any]) -> str:
    """Return the samples of a rank as a short text; "" without samples."""
    parts = []
    if watts := one.get("watts"):
        parts.append(f"{fmean(watts):.0f} W, up to {max(watts):.0f}")
    if clock := one.get("megahertz"):
        parts.append(f"{min(clock):.0f} to {max(clock):.0f} MHz")
    if heat := one.get("celsius"):
        parts.append(f"up to {max(heat):.0f} °C")
    if (energy := one.get("joules")) and energy[-1] > energy[0]:
        parts.append(f"{energy[-1] - energy[0]:.0f} J in {(one['time_ns'][-1] - one['time_ns'][0]) / 1e9:.1f} s")
    return "; ".join(parts)
