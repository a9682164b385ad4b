"""What one rank writes down: its rows, the clock that marks them, and what its plans say of them."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import asdict
from typing import Any

import torch

from burst_portable.backends.registry import for_device, meter_of, peaks_of, rates_of
from burst_portable.cost import pass_flops, rank_cost
from burst_portable.errors import InputError
from burst_portable.layout import Layout
from burst_portable.plans import PASSES, Plan
from burst_portable.profiling.alternatives import layouts, strategies
from burst_portable.profiling.events import Clock, make_clock
from burst_portable.profiling.place import Place
from burst_portable.profiling.record import COLUMNS, TIMES, RankRecords, Table
from burst_portable.profiling.sensors import Sensors
from burst_portable.rates import Rates
from burst_portable.steps import Compute

Annotate = Callable[[Place], AbstractContextManager[object]]

_PLANNED = ("flops", "memory", "sent", "received", "seconds", "compute_seconds", "link_seconds")
LIGHT_KEPT = 100_000
"""Rows of a kind that the light level keeps: the latest."""


class Recorder:
    """The rows of one rank, and the clock that marks them; `rates`: a file to predict with, see `measured_rates`."""

    def __init__(
        self, rank: int, host: str, *, light: bool, annotate: Annotate | None = None, since: int | None = None,
        rates: str = "",
    ) -> None:  # fmt: skip
        self._rates = rates
        self.rank, self.host, self.light, self.annotate = rank, host, light, annotate
        self._since: Any = time.perf_counter_ns() if since is None else since  # the training step's begin
        self.marked: deque[tuple[Any, ...]] = deque(maxlen=LIGHT_KEPT if light else None)
        self.rows: dict[str, deque[tuple[Any, ...]]] = {
            kind: deque(maxlen=LIGHT_KEPT if light else None) for kind in COLUMNS
        }
        self.iteration, self.call = 0, 0
        self.kernels = self.waiting = 0  # nanoseconds, where marks are times already
        self.calls: deque[tuple[int, int, int]] = deque(maxlen=LIGHT_KEPT if light else None)
        self._plans: dict[int, tuple[int, Plan, PlanFacts]] = {}
        self._clocks: dict[torch.device, Clock] = {}
        self._device: torch.device | None = None
        self.sensors: Sensors | None = None
        self.transport = ""  # its name, known at the first call
        self.goes_first = False  # whether its messages do

    def clock(self, device: torch.device) -> Clock:
        """The clock of a device, made when it is first asked for."""
        if device not in self._clocks:
            backend = for_device(device.type)
            self._clocks[device] = make_clock(device, streams=backend.capabilities.streams)
            if not self._device or backend.capabilities.streams:  # else marks are times already
                self._device = device
            if self.sensors is None and not self.light and device.index is not None:
                self.sensors = Sensors(meter_of(backend, device.index))
        return self._clocks[device]

    @property
    def device_type(self) -> str | None:
        """Where attention was computed; None where it was not called yet."""
        return self._device.type if self._device else None

    def rejoin(self) -> None:
        """A pass is over when no stream waits for a message of it any longer."""
        for clock in self._clocks.values():
            clock.rejoin()

    def facts(self, plan: Plan) -> PlanFacts:
        """The facts of a plan that is about to run; they are worked out once, and the plan gets a number."""
        known = self._plans.get(id(plan))
        if known is None:
            known = self._plans[id(plan)] = len(self._plans), plan, PlanFacts(plan, self.rank)
        self.calls.append((self.iteration, self.call, known[0]))
        self.call += 1
        return known[2]

    def next_iteration(self) -> None:
        """The calls to come belong to the next training step."""
        since = self._since
        self.begin_step()
        if self.calls:
            self.marked.append((self.iteration, since, self._since))
            self.iteration, self.call = self.iteration + 1, 0

    def begin_step(self) -> None:
        """The training step begins now, on the device's clock; what came before belongs to no step."""
        self._since = self._clocks[self._device].mark() if self._device else time.perf_counter_ns()

    def records(self) -> RankRecords:
        """Everything that was recorded, in nanoseconds. On a device with streams, waits for the last mark."""
        clock = self._clocks[self._device] if self._device else None
        drift = clock.end() if clock else None
        for kind, rows in self.rows.items():
            times = [i for i, name in enumerate(COLUMNS[kind]) if name in TIMES]
            self.rows[kind] = deque((self._read(row, times) for row in rows), maxlen=rows.maxlen)
        self.marked = deque((self._read(row, [1, 2]) for row in self.marked), maxlen=self.marked.maxlen)
        device = self.device_type or "cpu"
        plans = [facts for _, _, facts in self._plans.values()]
        dtypes = sorted({facts.dtype for facts in plans if facts.dtype})
        return RankRecords(
            self.rank,
            self.host,
            clock.evidence if clock else "host clock",
            {kind: Table.of(kind, list(rows)) for kind, rows in self.rows.items()},
            [facts.described(device, self._rates, goes_first=self.goes_first) for facts in plans],
            list(self.calls),
            {
                "device": device,
                "light": self.light,
                "drift": drift and asdict(drift),
                "sensors": self.sensors.facts() if self.sensors else {"reason": "not read", "time": []},
                "transport": {"used": self.transport, "direct": for_device(device).capabilities.direct_transport},
                "peaks": [asdict(peaks_of(for_device(device), dtype)) for dtype in dtypes],
            },
            marked=list(self.marked),
        )

    def _read(self, row: tuple[Any, ...], times: list[int]) -> tuple[int, ...]:
        if all(isinstance(row[i], int) for i in times):
            return row
        assert self._device is not None
        clock = self._clocks[self._device]
        read = {i: row[i] if isinstance(row[i], int) else clock.read(row[i]) for i in times}
        return tuple(read.get(i, value) for i, value in enumerate(row))


class PlanFacts:
    """What a plan says about one rank's kernel calls."""

    def __init__(self, plan: Plan, rank: int) -> None:
        self.plan, self.rank = plan, rank
        self.dtype = ""  # of the tensors, known when they come
        self.computes: dict[tuple[bool, Compute], tuple[int, int, int, int]] = {}
        for backward, (name, pass_plan) in enumerate(plan.passes()):
            for step in plan.steps(name, rank):
                if c := step.compute:
                    area = c.tiles.area
                    work = pass_flops(pass_plan.problem, name, area)
                    self.computes[bool(backward), c] = step.index, area, len(c.tiles), work

    def described(self, device_type: str, file: str = "", *, goes_first: bool = False) -> dict[str, Any]:
        """The plan's facts for a report; predictions use the rates of a file, else the backend's."""
        plan, p = self.plan, self.plan.problem
        rates, source = self._rates_and_source(device_type, file, goes_first)
        costs = {name: rank_cost(plan, name, self.rank, rates) for name in PASSES}
        return {
            "strategy": plan.strategy,
            "reason": plan.reason,
            "ranks": p.ranks,
            "inner": plan.inner,
            "mask": str(p.mask),
            "layout": _layout_name(p.q_layout),
            "seq_len": p.q_layout.length,
            "heads": p.heads,
            "kv_heads": p.kv_heads,
            "head_dim": p.head_dim,
            "value_dim": p.value_dim,
            "batch": p.batch,
            "itemsize": p.itemsize,
            "dtype": self.dtype,
            "travels": {name: pass_plan.side for name, pass_plan in plan.passes()},
            "direct": plan.direct,
            "layouts": layouts(p),
            "rates": {"tflops": rates.tflops, "gbps": rates.gbps, "source": source},
            "planned": {
                **{name: {key: getattr(c, key) for key in _PLANNED} for name, c in costs.items()},
                "alternatives": strategies(plan, self.rank, rates),
            },
        }

    def _rates_and_source(self, device_type: str, file: str, goes_first: bool) -> tuple[Rates, str]:
        """The rates for predictions and where they come from. An unusable file does not prevent a report."""
        backend, p = for_device(device_type), self.plan.problem
        unusable = ""
        try:
            rates = rates_of(backend, p.ranks, file=file, dtype=self.dtype, head_dim=p.head_dim, goes_first=goes_first)
        except InputError:
            rates = rates_of(backend, p.ranks, goes_first=goes_first)
            unusable = "; the file of rates that the settings name cannot be used"
        return rates, (rates.source.removeprefix("of ") or "the backend's guess") + unusable


def _layout_name(layout: Layout) -> str:
    """Its name; of one that was made without, its shape."""
    first = layout.shards[0]
    return layout.name or f"{len(first)} segment{'s' if len(first) > 1 else ''} a rank, step {first[0].step}"
