"""Seconds of work that all ranks do: the slowest rank's, so that all ranks read the same."""

from __future__ import annotations

import struct
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from statistics import median_high

import torch

from burst_portable.comm.base import Transport

ROUNDS, LEAST_ROUNDS = 5, 3
_HELD = 100  # passes over _HOLD bytes: 2 to 10 ms
_HELD_AT_MOST = 8 * _HELD
_HOLD = 64 << 20
_ENOUGH = 1.5  # seconds, after which `LEAST_ROUNDS` rounds are enough


class Clock(ABC):
    """Times calls on this rank's device; how ranks meet and compare is left open.

    Attributes:
        device: what calls work on.
        streams: whether they return before their work is done.
    """

    def __init__(self, device: torch.device, *, streams: bool) -> None:
        self.device, self.streams = device, streams
        self._varied = 1.0

    @abstractmethod
    def meet(self) -> None:
        """Return, or let the device go on, when all ranks have come here."""

    @abstractmethod
    def slowest(self, value: float) -> float:
        """The largest of all ranks."""

    def time(self, call: Callable[[], object], calls: int) -> float:
        """Seconds per call, over `calls` calls back to back, after all ranks have met."""
        self.begin()
        if not self.streams:
            started = time.perf_counter()
            for _ in range(calls):
                call()
            return self.slowest((time.perf_counter() - started) / calls)
        before, after = torch.Event(enable_timing=True), torch.Event(enable_timing=True)
        before.record()
        for _ in range(calls):
            call()
        in_time = not before.query()
        after.record()
        self.settle()
        if self.counts(in_time):
            return self.slowest(before.elapsed_time(after) / 1e3 / calls)
        return self.time(call, calls)

    def begin(self) -> None:
        """Wait until nothing is under way and all ranks have come here."""
        self.settle()
        self.meet()
        self.settle()

    def counts(self, in_time: bool) -> bool:
        """Whether a measurement is valid; `in_time`: the host had given the device everything before it began."""
        return True

    def settle(self) -> None:
        """Wait until nothing is under way any more."""
        if self.streams:
            torch.accelerator.synchronize()

    def median(self, call: Callable[[], object], calls: int = 1) -> float:
        """Seconds per call: the median of several rounds, fewer for long calls. Warm up before."""
        return self.medians([call], calls)[0]

    def medians(self, several: Sequence[Callable[[], object]], calls: int = 1) -> list[float]:
        """The same for several calls in turn, so that a machine that slows down affects all of them."""
        rounds: list[list[float]] = []
        while len(rounds) < LEAST_ROUNDS or (len(rounds) < ROUNDS and calls * sum(map(sum, rounds)) < _ENOUGH):
            rounds.append([self.time(call, calls) for call in several])
        found = list(zip(*rounds, strict=True))
        self._varied = max(self._varied, *(max(times) / min(times) for times in found if min(times) > 0), 1.0)
        return [median_high(times) for times in found]

    def varied(self) -> float:
        """The longest round of any call over its shortest, among calls measured since this was last asked."""
        most, self._varied = self._varied, 1.0
        return most


class TransportClock(Clock):
    """The ranks of a transport, which meet and compare over it.

    Times what devices do: a host that posts ten messages takes longer than a fast link. So devices are held until
    their hosts have given them everything. Where a host cannot be ahead, because something waits for the device, its
    time counts after all.
    """

    def __init__(self, transport: Transport, device: torch.device, *, streams: bool) -> None:
        super().__init__(device, streams=streams)
        self._transport = transport
        self._passes = _HELD
        self._held = torch.zeros(_HOLD // 4 if streams else 1, device=device)
        self._mine = torch.zeros(1, dtype=torch.uint8, device=device)
        self._all = [torch.empty_like(self._mine) for _ in range(transport.size)]

    def meet(self) -> None:
        self._transport.all_gather(self._mine, self._all, "meeting to be timed")

    def begin(self) -> None:
        """Give each device something to do first, then let them meet; what is timed comes next."""
        if not self.streams or not self._passes:
            super().begin()
            return
        self.settle()
        for _ in range(self._passes):
            self._held.add_(1.0)
        self.meet()

    def counts(self, in_time: bool) -> bool:
        """The same on all ranks. If some host was late, devices are held for longer, and in the end not at all."""
        late = self._passes > 0 and self.slowest(float(not in_time)) > 0
        if late:
            self._passes = 2 * self._passes if self._passes < _HELD_AT_MOST else 0
        return not late

    def slowest(self, value: float) -> float:
        told = self._transport.share(struct.pack("<d", value), "the slowest rank's time")
        return max(float(struct.unpack("<d", one)[0]) for one in told)
