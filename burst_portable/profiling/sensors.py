"""Power, clock, temperature and energy of a rank's device while a session runs, read ten times a second by a thread."""

from __future__ import annotations

import time
from collections import deque
from statistics import fmean
from typing import Any

from burst_portable.backends.base import Meter
from burst_portable.background import Background

NAMES = ("watts", "megahertz", "celsius", "joules")
_EVERY = 0.1  # seconds
_KEPT = 3000  # the latest: five minutes


class Sensors:
    """Samples of one device. `reason` says why there are none."""

    def __init__(self, meter: Meter | str) -> None:
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
                if not thread.pause(_EVERY):
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
