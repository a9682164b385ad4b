"""Clocks. A mark is taken where something starts or ends, and read as nanoseconds much later.

On the CPU, work is done when a call returns, so the host's monotonic clock is the device's. On a device with streams a
mark is an event on the current stream: recording one costs microseconds, waits for nothing, and is read when the
session is over.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from statistics import fmean
from typing import Any, Protocol

import torch

from burst_portable.backends.base import Meter
from burst_portable.profiling.records import NEVER
from burst_portable.utils.threads import Background

_ANCHORS = 5  # at each end of a session: the one that took the shortest wait is kept
_BASE_EVERY = 512  # marks: elapsed times are 32-bit milliseconds, exact to a microsecond only for a few seconds


class Clock(Protocol):
    """Marks now, nanoseconds later."""

    @property
    def evidence(self) -> str:
        """What its times are, for reports."""

    def mark(self) -> Any:
        """Note this moment of the current stream, without waiting for it."""

    def arrival(self, wait: Callable[[], None]) -> Any:
        """Note when something that runs on its own is over, without the current stream waiting; or `NEVER`."""

    def rejoin(self) -> None:
        """Let the current stream continue only after all arrivals that were asked for."""

    def end(self) -> Drift | None:
        """All marks are taken, and will be read: how far the device's clock went from the host's, or None where they
        are one. Waits for the device."""

    def read(self, mark: Any) -> int:
        """A mark in nanoseconds of the host's monotonic clock. May wait for the device."""


@dataclass(frozen=True)
class Drift:
    """How much slower a device's clock is than the host's, between the anchors of a session, in millionths.

    Attributes:
        ppm: above zero where the device's clock is the slower one.
        uncertainty_ppm: what the anchors cannot tell: how long the host waited for them, over the time between.
        corrected: whether marks are stretched to fit, which they are where there is more drift than uncertainty.
    """

    ppm: float
    uncertainty_ppm: float
    corrected: bool


class HostClock:
    """For devices whose work is done when a call returns."""

    evidence = "host clock"
    mark = staticmethod(time.perf_counter_ns)

    def arrival(self, wait: Callable[[], None]) -> int:
        return NEVER  # nothing here could wait but the rank itself

    def rejoin(self) -> None:
        """Nothing runs on its own."""

    def end(self) -> None:
        return None

    def read(self, mark: int) -> int:
        return mark


class DeviceMark:
    """A moment on a stream: an event until it is read, then a number. Several rows may share one."""

    __slots__ = ("base", "event", "time")

    def __init__(self, base: torch.Event, event: torch.Event) -> None:
        self.base = base
        self.event: torch.Event | None = event
        self.time = NEVER


class DeviceClock:
    """For devices with streams: events from a pool, anchored to the host's clock at both ends of a session.

    An anchor is an event that was waited for. The two clocks run at rates of their own, some millionths apart, which is
    milliseconds in an hour: what lies between the anchors is interpolated.
    """

    evidence = "device events"

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool: list[torch.Event] = []
        self._marks = 0
        self._base, self._from, self._took = self._best_anchor()
        self._stretch = 0.0  # nanoseconds of the host more, for each of the device
        self._offset: dict[int, int] = {id(self._base): self._from}
        self._before: dict[int, torch.Event] = {}  # the base before a base; all are kept, so that no id is used again
        self._kept = [self._base]
        self._watcher: torch.Stream | None = None
        self._apart = False  # the watcher was given something that no other stream has waited for

    def _best_anchor(self) -> tuple[torch.Event, int, int]:
        best, *others = sorted((self._anchor() for _ in range(_ANCHORS)), key=lambda anchor: anchor[2])
        self._pool += [event for event, *_ in others]
        return best

    def _anchor(self) -> tuple[torch.Event, int, int]:
        """An event, the host's time in the middle of waiting for it, and how long that took."""
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
        with self._watcher:  # it waits; the rank's own stream goes on
            wait()
            event = self._event()
            event.record()
            self._apart = True
        return DeviceMark(self._base, event)

    def rejoin(self) -> None:
        if self._watcher is not None and self._apart:
            torch.accelerator.current_stream(self._device).wait_stream(self._watcher)
            self._apart = False

    def end(self) -> Drift:
        event, until, took = self._best_anchor()
        told = self._at(self._base, event)
        self._pool.append(event)
        span, unsure = max(1, told - self._from), (self._took + took) // 2
        corrected = abs(until - told) > unsure
        self._stretch = (until - told) / span if corrected else 0.0
        return Drift(1e6 * (until - told) / span, 1e6 * unsure / span, corrected)

    def read(self, mark: DeviceMark) -> int:
        if (event := mark.event) is not None:
            event.synchronize()
            told = self._at(mark.base, event)
            mark.time = told + round((told - self._from) * self._stretch)
            self._pool.append(event)
            mark.event = None
        return mark.time

    def _at(self, base: torch.Event, event: torch.Event) -> int:
        """When an event was reached, by the device's clock from the first anchor on."""
        return self._start(base) + round(base.elapsed_time(event) * 1e6)

    def _start(self, base: torch.Event) -> int:
        """When a base was reached: the way from one base to the next, added up."""
        way = []
        while id(base) not in self._offset:
            way.append(base)
            base = self._before[id(base)]
        for following in reversed(way):
            following.synchronize()
            self._offset[id(following)] = self._offset[id(base)] + round(base.elapsed_time(following) * 1e6)
            base = following
        return self._offset[id(base)]


def make_clock(device: torch.device, *, streams: bool) -> Clock:
    """The clock of a device; `streams` is its backend's capability."""
    return DeviceClock(device) if streams else HostClock()


NAMES = ("watts", "megahertz", "celsius", "joules")
SENSORS_EVERY = 0.1
"""Default seconds between samples."""
_KEPT = 3000  # the latest: five minutes


class Sensors:
    """Samples of one device, one every `every` seconds. `reason` says why there are none."""

    def __init__(self, meter: Meter | str, *, every: float = SENSORS_EVERY) -> None:
        self._every = every
        self.reason = meter if isinstance(meter, str) else ""
        self._rows: deque[tuple[int, dict[str, float]]] = deque(maxlen=_KEPT)
        self._meter = meter
        self._thread: Background[Sensors] | None = None
        if not isinstance(meter, str):
            self._thread = Background(self, Sensors._watch, "burst_portable sensors")
            self._thread.wake(self)

    def stop(self) -> None:
        """Read no more."""
        if self._thread is not None:
            self._thread.stop()

    def _watch(self) -> None:
        meter, thread = self._meter, self._thread
        assert thread is not None, "this is the thread"
        assert not isinstance(meter, str), "there is none where there is no meter"
        try:
            while True:
                self._rows.append((time.perf_counter_ns(), meter.read()))
                if not thread.pause(self._every):
                    return
        finally:
            meter.close()

    def facts(self) -> dict[str, Any]:
        """Columns: `time` in nanoseconds of the host's clock, and a list for each sensor that there is."""
        rows = list(self._rows)
        names = [name for name in NAMES if rows and all(name in values for _, values in rows)]
        columns = {name: [values[name] for _, values in rows] for name in names}
        return {"reason": self.reason, "time": [at for at, _ in rows], **columns}


def told(one: dict[str, Any]) -> str:
    """A rank's samples in a few words; "" where there are none."""
    parts = []
    if watts := one.get("watts"):
        parts.append(f"{fmean(watts):.0f} W, up to {max(watts):.0f}")
    if clock := one.get("megahertz"):
        parts.append(f"{min(clock):.0f} to {max(clock):.0f} MHz")
    if heat := one.get("celsius"):
        parts.append(f"up to {max(heat):.0f} °C")
    if (energy := one.get("joules")) and energy[-1] > energy[0]:
        parts.append(f"{energy[-1] - energy[0]:.0f} J in {(one['time'][-1] - one['time'][0]) / 1e9:.1f} s")
    return "; ".join(parts)
