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
_ENOUGH = 1.5  # seconds of rounds, after which the least will do


class Clock(ABC):
    """Times calls on this rank's device; how ranks meet and compare is left open.

    Attributes:
        device: what calls work on.
        streams: whether they return before their work is done.
    """

    def __init__(self, device: torch.device, *, streams: bool) -> None:
        self.device, self.streams = device, streams

    @abstractmethod
    def meet(self) -> None:
        """Return, or let the device go on, when all ranks have come here."""

    @abstractmethod
    def slowest(self, value: float) -> float:
        """The largest of all ranks."""

    def time(self, call: Callable[[], object], calls: int) -> float:
        """Seconds a call, of so many back to back, after all ranks have met."""
        self.settle()
        self.meet()
        self.settle()
        if not self.streams:
            started = time.perf_counter()
            for _ in range(calls):
                call()
            return self.slowest((time.perf_counter() - started) / calls)
        before, after = torch.Event(enable_timing=True), torch.Event(enable_timing=True)
        before.record()
        for _ in range(calls):
            call()
        after.record()
        self.settle()
        return self.slowest(before.elapsed_time(after) / 1e3 / calls)

    def settle(self) -> None:
        """Nothing is under way any more."""
        if self.streams:
            torch.accelerator.synchronize()

    def median(self, call: Callable[[], object], calls: int = 1) -> float:
        """Seconds a call: of several rounds the one in the middle; of long calls there are fewer. Warm up before."""
        return self.medians([call], calls)[0]

    def medians(self, several: Sequence[Callable[[], object]], calls: int = 1) -> list[float]:
        """The same of several calls in turn, so that a machine that slows down slows all of them."""
        rounds: list[list[float]] = []
        while len(rounds) < LEAST_ROUNDS or (len(rounds) < ROUNDS and calls * sum(map(sum, rounds)) < _ENOUGH):
            rounds.append([self.time(call, calls) for call in several])
        return [median_high(times) for times in zip(*rounds, strict=True)]


class TransportClock(Clock):
    """The ranks of a transport, which meet and compare over it."""

    def __init__(self, transport: Transport, device: torch.device, *, streams: bool) -> None:
        super().__init__(device, streams=streams)
        self._transport = transport
        self._mine = torch.zeros(1, dtype=torch.uint8, device=device)
        self._all = [torch.empty_like(self._mine) for _ in range(transport.size)]

    def meet(self) -> None:
        self._transport.all_gather(self._mine, self._all, "meeting to be timed")

    def slowest(self, value: float) -> float:
        told = self._transport.share(struct.pack("<d", value), "the slowest rank's time")
        return max(float(struct.unpack("<d", one)[0]) for one in told)
