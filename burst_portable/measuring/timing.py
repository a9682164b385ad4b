"""Time kernels and messages on all ranks. The slowest rank counts, so that all ranks get the same result."""

from __future__ import annotations

import struct
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median_high
from typing import NamedTuple

import torch
from torch import Tensor

from burst_portable.comm.base import Handle, Message, Transport
from burst_portable.kernels.base import BackwardInputs, Kernel, torch_dtype
from burst_portable.layout import Segment
from burst_portable.mask import Mask
from burst_portable.numerics import accumulation_dtype, finished
from burst_portable.planning.call import AttentionCall
from burst_portable.planning.hardware import Curve
from burst_portable.planning.plans import PASSES, PassName
from burst_portable.planning.tiles import find_tiles

_MIN_LATENCY = 1e-7  # seconds: less is noise, and 0 would mean unknown


class Speed(NamedTuple):
    """TFLOP/s and seconds of latency of kernel calls, and whether two lengths were enough to separate them."""

    tflops: float
    latency: float
    is_resolved: bool


def fit_speed(short: tuple[float, float], long: tuple[float, float]) -> Speed:
    """Fit seconds = latency + FLOPs / rate to (FLOPs, seconds) of a short and of a long call.

    If the fit has no positive latency or rate, all time of the long call counts as computing.
    """
    (few, fast), (many, slow) = short, long
    if slow > fast and (latency := fast - few * (slow - fast) / (many - few)) >= _MIN_LATENCY:
        return Speed((many - few) / (slow - fast) / 1e12, latency, True)
    return Speed(many / slow / 1e12, _MIN_LATENCY, False)


def slowdown_share(kernel: float, messages: float, both: float) -> float | None:
    """Return the share of the seconds of messages by which they delay concurrent kernels, from 0 to 1.

    See `planning.hardware.HardwareSpec.comm_slowdown`: together, both take kernel + share * messages. Return None if
    messages take longer than the kernels, so that the cause of a delay is unknown.
    """
    return None if messages > kernel else min(1.0, max(0.0, (both - kernel) / messages))


ROUNDS, MIN_ROUNDS = 5, 3
_DELAY_PASSES = 100  # over DELAY_BYTES: 2 to 10 ms
_MAX_DELAY_PASSES = 8 * _DELAY_PASSES
DELAY_BYTES = 64 << 20
"""Default size of the tensor that a device adds to while it waits for its host."""
_ENOUGH_SECONDS = 1.5  # after this time, `MIN_ROUNDS` rounds are enough


class Clock(ABC):
    """Time calls on this rank's device. Subclasses define how ranks synchronize and compare.

    Attributes:
        device: Device of the calls.
        streams: Whether calls return before their work is done.
    """

    def __init__(self, device: torch.device, *, streams: bool) -> None:
        self.device, self.streams = device, streams
        self._max_over_min = 1.0

    @abstractmethod
    def meet(self) -> None:
        """Wait for all ranks, on the host or on the device."""

    @abstractmethod
    def slowest(self, value: float) -> float:
        """Return the largest value of all ranks."""

    def time(self, call: Callable[[], object], calls: int) -> float:
        """Return the seconds per call of `calls` calls back to back, after all ranks have arrived."""
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
        if self.is_valid(in_time):
            return self.slowest(before.elapsed_time(after) / 1e3 / calls)
        return self.time(call, calls)

    def begin(self) -> None:
        """Wait until the device is idle and all ranks have arrived."""
        self.settle()
        self.meet()
        self.settle()

    def is_valid(self, in_time: bool) -> bool:
        """Return whether a measurement is valid. `in_time`: the host queued all calls before the device began."""
        return True

    def settle(self) -> None:
        """Wait until the device is idle."""
        if self.streams:
            torch.accelerator.synchronize()

    def median(self, call: Callable[[], object], calls: int = 1) -> float:
        """Return the seconds per call: the median of several rounds, fewer for long calls. Warm up first."""
        return self.medians([call], calls)[0]

    def medians(self, several: Sequence[Callable[[], object]], calls: int = 1) -> list[float]:
        """Return the same for several calls in turn, so that a slower machine affects all of them."""
        rounds: list[list[float]] = []
        while len(rounds) < MIN_ROUNDS or (len(rounds) < ROUNDS and calls * sum(map(sum, rounds)) < _ENOUGH_SECONDS):
            rounds.append([self.time(call, calls) for call in several])
        found = list(zip(*rounds, strict=True))
        ratios = (max(times) / min(times) for times in found if min(times) > 0)
        self._max_over_min = max(self._max_over_min, *ratios, 1.0)
        return [median_high(times) for times in found]

    def pop_max_over_min(self) -> float:
        """Return the longest round of a call over its shortest, the largest of all calls since the last query."""
        ratio, self._max_over_min = self._max_over_min, 1.0
        return ratio


class TransportClock(Clock):
    """Clock that synchronizes and compares ranks over their transport.

    It measures the time of devices: posting ten messages on the host takes longer than a fast link. So each device is
    delayed until its host has queued everything. If a call waits for the device, the time of the host is included.
    """

    def __init__(
        self, transport: Transport, device: torch.device, *, streams: bool, delay_bytes: int = DELAY_BYTES
    ) -> None:
        super().__init__(device, streams=streams)
        self._transport = transport
        self._passes = _DELAY_PASSES
        self._delay = torch.zeros(delay_bytes // 4 if streams else 1, device=device)
        self._token = torch.zeros(1, dtype=torch.uint8, device=device)
        self._all = [torch.empty_like(self._token) for _ in range(transport.size)]

    def meet(self) -> None:
        self._transport.all_gather(self._token, self._all, "barrier before timing")

    def begin(self) -> None:
        """Delay each device with other work, then let the devices wait for each other."""
        if not self.streams or not self._passes:
            super().begin()
            return
        self.settle()
        for _ in range(self._passes):
            self._delay.add_(1.0)
        self.meet()

    def is_valid(self, in_time: bool) -> bool:
        """Return the same result on all ranks. After a late host, delay devices for longer, and finally not at all.

        The next call gets a delay again: one call that waits for the device does not decide how others are timed.
        """
        late = self._passes > 0 and self.slowest(float(not in_time)) > 0
        if late:
            self._passes = 2 * self._passes if self._passes < _MAX_DELAY_PASSES else 0
        elif not self._passes:
            self._passes = _DELAY_PASSES
        return not late

    def slowest(self, value: float) -> float:
        values = self._transport.share(struct.pack("<d", value), "the slowest rank's time")
        return max(float(struct.unpack("<d", one)[0]) for one in values)


_BATCH_SECONDS, _MAX_CALLS = 0.1, 10  # of calls back to back

Passes = dict[PassName, Callable[[], object]]


class Block:
    """The kernel calls of one causal sequence on one rank, as for the local block of a plan.

    Attributes:
        passes: Kernel call of each pass.
        overlapped: The same calls as they run during messages.
        flops: FLOPs of each pass, by the exact number of pairs.
        max_over_min: Longest over shortest round of each pass, set by `seconds`.
    """

    def __init__(
        self, kernel: Kernel, call: AttentionCall, length: int, device: torch.device, *, yields_to_comm: bool = False
    ) -> None:
        generator, dtype = torch.Generator(device).manual_seed(0), torch_dtype(call)
        query, key = (call.heads, call.head_dim), (call.kv_heads, call.head_dim)
        value, output = (call.kv_heads, call.v_head_dim), (call.heads, call.v_head_dim)
        q, k, v, dout = (
            torch.randn(1, length, heads, dim, device=device, generator=generator).to(dtype)
            for heads, dim in (query, key, value, output)
        )
        mask, segment = Mask.causal(), (Segment(0, length),)
        tiles = find_tiles(mask, segment, segment)
        wide, lse = finished(kernel.attend(q, k, v, tiles, call), dtype)
        out = wide.to(dtype)
        row = {"out": out} if kernel.traits.splits_tiles else {"delta": kernel.row_delta(dout, out)}
        x = BackwardInputs(dout, q, k, v, lse, **row)
        dq, dk, dv = (torch.zeros(x.shape, dtype=accumulation_dtype(x.dtype), device=device) for x in (q, k, v))

        def backward() -> None:
            kernel.attend_backward(x, tiles, call, into=(dq, dk, dv))

        self.passes: Passes = {"forward": lambda: kernel.attend(q, k, v, tiles, call), "backward": backward}
        self.overlapped: Passes = {
            "forward": lambda: kernel.attend(q, k, v, tiles, call, yields_to_comm=yields_to_comm),
            "backward": backward,
        }
        self.max_over_min: dict[PassName, float] = {}
        pairs = 2 * mask.num_pairs(length, length) * call.heads
        self.flops: dict[PassName, int] = {
            "forward": pairs * (call.head_dim + call.v_head_dim),
            "backward": pairs * (3 * call.head_dim + 2 * call.v_head_dim),
        }

    def seconds(self, clock: Clock) -> dict[PassName, float]:
        """Return the seconds of a call of each pass; short calls are timed back to back."""
        found: dict[PassName, float] = {}
        for name in PASSES:
            call = self.passes[name]
            call()
            one = clock.time(call, 1)
            clock.pop_max_over_min()
            found[name] = clock.median(call, max(1, min(_MAX_CALLS, round(_BATCH_SECONDS / one))))
            self.max_over_min[name] = clock.pop_max_over_min()
        return found


def memory_bandwidth(clock: Clock, size: int) -> float:
    """Return the GB/s of an elementwise add, which reads two tensors of `size` bytes and writes one."""
    a, b, out = (torch.ones(size // 4, device=clock.device) for _ in range(3))

    def add() -> None:
        torch.add(a, b, out=out)

    add()
    return 3 * size / clock.median(add, _MAX_CALLS) / 1e9


CALLS = 10  # messages back to back, a lap
LAP_BYTES = 640 << 20
"""Default maximum bytes of a lap: two long messages are enough, and peer memory must hold a lap of every rank."""
_MAX_LAP_SECONDS = 2.0  # after a longer lap, larger messages are left out
_SMALL = 256  # bytes of a message whose time is all latency


@dataclass(frozen=True)
class Peers:
    """The ranks that a rank sends to (`targets`) and receives from (`sources`)."""

    targets: Sequence[int]
    sources: Sequence[int]

    @classmethod
    def next(cls, rank: int, ranks: int, node: int = 0) -> Peers:
        """Return the next rank; with nodes, the next rank of the same node."""
        node = node or ranks
        first = rank // node * node
        return cls([first + (rank - first + 1) % node], [first + (rank - first - 1) % node])

    @classmethod
    def all_in_node(cls, rank: int, ranks: int, node: int = 0) -> Peers:
        """Return all other ranks of the node, the next one first."""
        node = node or ranks
        first = rank // node * node
        targets = [first + (rank - first + distance) % node for distance in range(1, node)]
        return cls(targets, targets[::-1])

    @classmethod
    def next_node(cls, rank: int, ranks: int, node: int) -> Peers:
        """Return the rank with the same local rank in the next node."""
        return cls([(rank + node) % ranks], [(rank - node) % ranks])


@contextmanager
def messages_in_flight(transport: Transport, block: Tensor, peers: Peers, calls: int = CALLS) -> Iterator[None]:
    """Exchange `calls` messages with each peer while the `with` block runs; wait for all of them on exit."""
    size = block.numel()
    transport.begin(b"links", calls * size)
    handles: list[Handle] = []
    kept: list[Tensor] = []
    for _ in range(calls):
        received = [transport.receive_buffer(size, block.device, peer) for peer in peers.sources]
        kept += received
        leaving, arriving = transport.post(
            [Message(block, peer) for peer in peers.targets],
            [Message(buffer, peer) for buffer, peer in zip(received, peers.sources, strict=True)],
            "links",
        )
        handles += [*leaving, *arriving]
    yield
    for handle in dict.fromkeys(handles):
        handle.wait()
    transport.end()


def lap(transport: Transport, block: Tensor, peers: Peers, calls: int = CALLS) -> Callable[[], None]:
    """Return a function that exchanges `calls` messages with each peer and waits for them."""

    def run() -> None:
        with messages_in_flight(transport, block, peers, calls):
            pass

    return run


def measure_curve(
    clock: Clock, transport: Transport, peers: Peers, sizes: Sequence[int], *, lap_bytes: int = LAP_BYTES
) -> Curve:
    """Return (bytes, GB/s per rank and direction); with several peers, the bytes of all of them together.

    Larger messages are sent less often, so that a lap has at most `lap_bytes`, but at least two messages.
    """
    points: list[tuple[int, float]] = []
    for size in sizes:
        each = max(1, size // len(peers.targets))
        block = torch.ones(each, dtype=torch.uint8, device=clock.device)
        calls = max(2, min(CALLS, lap_bytes // size))
        run = lap(transport, block, peers, calls)
        run()
        seconds = clock.median(run)
        size = each * len(peers.targets)
        points.append((size, calls * size / seconds / 1e9))
        if seconds > _MAX_LAP_SECONDS:
            break
    return tuple(points)


def message_latency(clock: Clock, transport: Transport, peers: Peers) -> float:
    """Return the seconds of a small message among many. The difference of two laps cancels the start of the ranks."""
    block = torch.ones(_SMALL, dtype=torch.uint8, device=clock.device)
    few, many = (lap(transport, block, peers, calls) for calls in (CALLS, 3 * CALLS))
    few(), many()
    shorter, longer = clock.medians([few, many])
    return (longer - shorter) / (2 * CALLS) if longer > shorter else longer / (3 * CALLS)
