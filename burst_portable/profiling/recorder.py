"""Define `Recorder`, which holds the recorded events of one rank, their clocks and the facts of its plans."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import asdict
from typing import Any

import torch

from burst_portable.backends.base import Backend
from burst_portable.backends.selection import for_device, open_or_reason
from burst_portable.planning.plans import Plan
from burst_portable.profiling.clocks import HostClock, Sensors, make_clock, read_core_wait
from burst_portable.profiling.event_tables import COLUMNS, TIMES, PlanLocation, RankRecords, Table
from burst_portable.profiling.plan_facts import PlanFacts

Annotate = Callable[[PlanLocation], AbstractContextManager[object]]
BASIC_KEPT = 100_000
"""Number of latest rows of a kind that level "basic" keeps."""


class Recorder:
    """Record the events of one rank.

    `annotate` annotates the tracer's trace. The first training step starts at `since` nanoseconds, by default now.
    `hardware` is a file of the `HardwareSpec` for predictions, by default the backend's own.
    """

    def __init__(
        self,
        rank: int,
        host: str,
        *,
        level: str = "standard",
        annotate: Annotate | None = None,
        since: int | None = None,
        hardware: str = "",
    ) -> None:
        self._hardware = hardware
        self.rank, self.host, self.level, self.annotate = rank, host, level, annotate
        self._since: Any = time.perf_counter_ns() if since is None else since  # start of the current training step
        kept = BASIC_KEPT if self.is_basic else None
        self.train_steps: deque[tuple[Any, ...]] = deque(maxlen=kept)
        self.core_waits: deque[tuple[int, int]] = deque(maxlen=kept)
        self._core_wait = read_core_wait()  # nanoseconds at the start of the current training step
        self.rows: dict[str, deque[tuple[Any, ...]]] = {kind: deque(maxlen=kept) for kind in COLUMNS}
        self.train_step, self.attention_call = 0, 0
        self.kernels = self.waiting = 0  # nanoseconds, if marks are times of the host
        self.calls: deque[tuple[int, int, int]] = deque(maxlen=kept)
        self._plans: dict[int, tuple[int, Plan, PlanFacts]] = {}
        self._clocks: dict[torch.device, HostClock] = {}
        self._device: torch.device | None = None
        self.sensors: Sensors | None = None
        self.transport = ""  # its name, set by the first call
        self.backend: Backend | None = None  # that of the calls, set by the first one
        self.used_kernels: dict[str, str] = {}  # name -> why the calls used it
        self.high_priority = False  # of its messages

    @property
    def is_basic(self) -> bool:
        """Return whether only kernels and waits are recorded, and only the latest."""
        return self.level == "basic"

    def clock(self, device: torch.device) -> HostClock:
        """Return the clock of a device; the first call creates it."""
        if device not in self._clocks:
            backend = self._backend_for(device.type)
            self._clocks[device] = make_clock(device, streams=backend.capabilities.streams)
            if not self._device or backend.capabilities.streams:  # otherwise marks are times of the host
                self._device = device
            if self.sensors is None and not self.is_basic and device.index is not None:
                self.sensors = Sensors(open_or_reason(backend.meter, device.index))
        return self._clocks[device]

    def _backend_for(self, device_type: str) -> Backend:
        """Return the backend of the calls, or the default one of another type of device."""
        if self.backend is not None and self.backend.capabilities.device_type == device_type:
            return self.backend
        return for_device(device_type)

    @property
    def device_type(self) -> str | None:
        """Type of the device that computes attention; None before the first call."""
        return self._device.type if self._device else None

    def rejoin(self) -> None:
        """End a pass: let the current streams wait until no stream waits for one of its messages."""
        for clock in self._clocks.values():
            clock.rejoin()

    def facts(self, plan: Plan) -> PlanFacts:
        """Return the facts of a plan that is about to run. The first call computes them and numbers the plan."""
        known = self._plans.get(id(plan))
        if known is None:
            known = self._plans[id(plan)] = len(self._plans), plan, PlanFacts(plan, self.rank)
        self.calls.append((self.train_step, self.attention_call, known[0]))
        self.attention_call += 1
        return known[2]

    def next_train_step(self) -> None:
        """Assign all later calls to the next training step."""
        since = self._since
        self._add_core_wait()
        self.begin_step()
        if self.calls:
            self.train_steps.append((self.train_step, since, self._since))
            self.train_step, self.attention_call = self.train_step + 1, 0

    def begin_step(self) -> None:
        """Start the training step now, on the device's clock. Earlier time belongs to no step."""
        self._core_wait = self._read_core_wait()
        self._since = self._clocks[self._device].mark() if self._device else time.perf_counter_ns()

    def _read_core_wait(self) -> int | None:
        """Return nanoseconds that this process has waited for a core; None if work runs on streams of a device."""
        if self._device is None or self._backend_for(self._device.type).capabilities.streams:
            return None
        return read_core_wait()

    def _add_core_wait(self) -> None:
        """Add the time that this process has waited for a core since the last call, or since the step began."""
        before, self._core_wait = self._core_wait, self._read_core_wait()
        if before is not None and self._core_wait is not None:
            self.core_waits.append((self.train_step, max(0, self._core_wait - before)))

    def records(self) -> RankRecords:
        """Return all records in nanoseconds. On a device with streams, wait for the last mark."""
        self._add_core_wait()
        clock = self._clocks[self._device] if self._device else None
        drift = clock.end() if clock else None
        for kind, rows in self.rows.items():
            times = [i for i, name in enumerate(COLUMNS[kind]) if name in TIMES]
            self.rows[kind] = deque((self._read(row, times) for row in rows), maxlen=rows.maxlen)
        self.train_steps = deque((self._read(row, [1, 2]) for row in self.train_steps), maxlen=self.train_steps.maxlen)
        device = self.device_type or "cpu"
        backend = self._backend_for(device)
        plans = [facts for _, _, facts in self._plans.values()]
        dtypes = sorted({facts.dtype for facts in plans if facts.dtype})
        return RankRecords(
            self.rank,
            self.host,
            clock.evidence if clock else "host clock",
            {kind: Table.of(kind, list(rows)) for kind, rows in self.rows.items()},
            [facts.describe(backend, self._hardware, high_priority=self.high_priority) for facts in plans],
            list(self.calls),
            {
                "device": device,
                "backend": backend.name,
                "kernels": list(self.used_kernels),
                "level": self.level,
                "drift": drift and asdict(drift),
                "sensors": self.sensors.facts() if self.sensors else {"reason": "not read", "time_ns": []},
                "transport": {"used": self.transport, "direct": backend.capabilities.direct_transport},
                "peaks": [asdict(backend.peaks(dtype)) for dtype in dtypes],
            },
            train_steps=list(self.train_steps),
            core_waits=list(self.core_waits),
        )

    def _read(self, row: tuple[Any, ...], times: list[int]) -> tuple[int, ...]:
        if all(isinstance(row[i], int) for i in times):
            return row
        assert self._device is not None
        clock = self._clocks[self._device]
        read = {i: row[i] if isinstance(row[i], int) else clock.read(row[i]) for i in times}
        return tuple(read.get(i, value) for i, value in enumerate(row))
