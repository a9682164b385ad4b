"""Seconds of work that all ranks do: the slowest rank's, so that all ranks read the same."""

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

_LEAST_LATENCY = 1e-7  # seconds: less is noise, and 0 would mean that nothing is known


class Speed(NamedTuple):
    """TFLOP/s, and seconds of latency per call; `apart`: whether the two lengths could tell these apart."""

    tflops: float
    latency: float
    apart: bool


def speed(short: tuple[float, float], long: tuple[float, float]) -> Speed:
    """From (FLOPs, seconds) of a short call and of a long one: time is latency + FLOPs / rate.

    Where that would be no latency, or no rate, all of the long call's time counts as computing: its own rate.
    """
    (few, fast), (many, slow) = short, long
    if slow > fast and (latency := fast - few * (slow - fast) / (many - few)) >= _LEAST_LATENCY:
        return Speed((many - few) / (slow - fast) / 1e12, latency, True)
    return Speed(many / slow / 1e12, _LEAST_LATENCY, False)


def share_held_up(kernel: float, messages: float, both: float) -> float | None:
    """The share of their time that messages keep kernels waiting which run beside them, from seconds of each alone and
    of both together; None where messages take longer than the kernels, which then may or may not be why both do.

    That of `planning.hardware.HardwareSpec.comm_slowdown`: both take kernel + share * messages.
    """
    if messages > kernel:
        return None
    return min(1.0, max(0.0, (both - kernel) / messages))


def gigabytes_a_second(size: float, seconds: float) -> float:
    """GB/s."""
    return size / seconds / 1e9


ROUNDS, LEAST_ROUNDS = 5, 3
_HELD = 100  # passes over HELD_BYTES: 2 to 10 ms
_HELD_AT_MOST = 8 * _HELD
HELD_BYTES = 64 << 20
"""Default bytes that a device adds to while it is held until its host is ahead."""
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

    def __init__(
        self, transport: Transport, device: torch.device, *, streams: bool, held_bytes: int = HELD_BYTES
    ) -> None:
        super().__init__(device, streams=streams)
        self._transport = transport
        self._passes = _HELD
        self._held = torch.zeros(held_bytes // 4 if streams else 1, device=device)
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


_AT_ONCE, _CALLS = 0.1, 10  # seconds that calls back to back should take together; the most calls

Passes = dict[PassName, Callable[[], object]]


class Block:
    """One sequence on one rank, causal: its kernel calls are those of a plan's own block.

    Attributes:
        passes: a kernel call each.
        beside: the same as called beside messages.
        flops: of each, by exact mask area.
        varied: of each, what `Clock.varied` told when it was timed.
    """

    def __init__(
        self, kernel: Kernel, call: AttentionCall, length: int, device: torch.device, *, yields_to_comm: bool = False
    ) -> None:
        generator, dtype = torch.Generator(device).manual_seed(0), torch_dtype(call)
        q, k, v, dout = (
            torch.randn(1, length, heads, dim, device=device, generator=generator).to(dtype)
            for heads, dim in (
                (call.heads, call.head_dim), (call.kv_heads, call.head_dim),
                (call.kv_heads, call.v_head_dim), (call.heads, call.v_head_dim),
            )
        )  # fmt: skip
        mask, segment = Mask.causal(), (Segment(0, length),)
        tiles = find_tiles(mask, segment, segment)
        wide, lse = finished(kernel.attend(q, k, v, tiles, call), dtype)
        out = wide.to(dtype)
        if kernel.traits.splits_tiles:
            x = BackwardInputs(dout, q, k, v, lse, out=out)
        else:
            x = BackwardInputs(dout, q, k, v, lse, delta=kernel.row_delta(dout, out))
        dq, dk, dv = (torch.zeros(x.shape, dtype=accumulation_dtype(x.dtype), device=device) for x in (q, k, v))

        def backward() -> None:
            kernel.attend_backward(x, tiles, call, into=(dq, dk, dv))

        self.passes: Passes = {"forward": lambda: kernel.attend(q, k, v, tiles, call), "backward": backward}
        self.beside: Passes = {
            "forward": lambda: kernel.attend(q, k, v, tiles, call, yields_to_comm=yields_to_comm),
            "backward": backward,
        }
        self.varied: dict[PassName, float] = {}
        pairs = 2 * mask.num_pairs(length, length) * call.heads
        self.flops: dict[PassName, int] = {
            "forward": pairs * (call.head_dim + call.v_head_dim),
            "backward": pairs * (3 * call.head_dim + 2 * call.v_head_dim),
        }

    def seconds(self, clock: Clock) -> dict[PassName, float]:
        """Seconds of a call of each pass; short calls are timed back to back."""
        found: dict[PassName, float] = {}
        for name in PASSES:
            call = self.passes[name]
            call()
            one = clock.time(call, 1)
            clock.varied()
            found[name] = clock.median(call, max(1, min(_CALLS, round(_AT_ONCE / one))))
            self.varied[name] = clock.varied()
        return found


def memory_rate(clock: Clock, size: int) -> float:
    """GB/s of an elementwise add: two tensors of `size` bytes are read, and one is written."""
    a, b, out = (torch.ones(size // 4, device=clock.device) for _ in range(3))

    def add() -> None:
        torch.add(a, b, out=out)

    add()
    return gigabytes_a_second(3 * size, clock.median(add, _CALLS))


CALLS = 10  # messages back to back
LAP_BYTES = 640 << 20
"""Default bytes of a lap: two long messages are enough, and peer memory must hold a lap of every rank."""
_LONG = 2.0  # seconds of a lap, after which larger messages are left out
_SMALL = 256  # bytes of a message that is all latency


@dataclass(frozen=True)
class Peers:
    """The ranks that a rank sends to, and those that it receives from."""

    there: Sequence[int]
    back: Sequence[int]

    @classmethod
    def next(cls, rank: int, ranks: int, node: int = 0) -> Peers:
        """The next rank, in the same node if there are nodes."""
        node = node or ranks
        first = rank // node * node
        return cls([first + (rank - first + 1) % node], [first + (rank - first - 1) % node])

    @classmethod
    def others(cls, rank: int, ranks: int, node: int = 0) -> Peers:
        """All others of the node, the next one first."""
        node = node or ranks
        first = rank // node * node
        there = [first + (rank - first + distance) % node for distance in range(1, node)]
        return cls(there, there[::-1])

    @classmethod
    def next_node(cls, rank: int, ranks: int, node: int) -> Peers:
        """The rank at the same place of the next node."""
        return cls([(rank + node) % ranks], [(rank - node) % ranks])


@contextmanager
def under_way(transport: Transport, block: Tensor, peers: Peers, calls: int = CALLS) -> Iterator[None]:
    """So many messages to each of these ranks and from each, which have all come when the block of code is left."""
    size = block.numel()
    transport.begin(b"links", calls * size)
    handles: list[Handle] = []
    kept: list[Tensor] = []
    for _ in range(calls):
        came = [transport.inbox(size, block.device, peer) for peer in peers.back]
        kept += came
        leaving, arriving = transport.post(
            [Message(block, peer) for peer in peers.there],
            [Message(buffer, peer) for buffer, peer in zip(came, peers.back, strict=True)],
            "links",
        )
        handles += [*leaving, *arriving]
    yield
    for handle in dict.fromkeys(handles):
        handle.wait()
    transport.end()


def lap(transport: Transport, block: Tensor, peers: Peers, calls: int = CALLS) -> Callable[[], None]:
    """These messages, and nothing beside them."""

    def run() -> None:
        with under_way(transport, block, peers, calls):
            pass

    return run


def curve(
    clock: Clock, transport: Transport, peers: Peers, sizes: Sequence[int], *, lap_bytes: int = LAP_BYTES
) -> Curve:
    """GB/s per rank in each direction by bytes: of a message, or of those to several ranks together.

    Larger messages are sent less often, so that a lap has at most `lap_bytes`, but at least two messages.
    """
    points: list[tuple[int, float]] = []
    for size in sizes:
        each = max(1, size // len(peers.there))
        block = torch.ones(each, dtype=torch.uint8, device=clock.device)
        calls = max(2, min(CALLS, lap_bytes // size))
        run = lap(transport, block, peers, calls)
        run()
        seconds = clock.median(run)
        size = each * len(peers.there)
        points.append((size, gigabytes_a_second(calls * size, seconds)))
        if seconds > _LONG:
            break
    return tuple(points)


def hop(clock: Clock, transport: Transport, peers: Peers) -> float:
    """Seconds of a message so small that its size takes no time, among others; how far apart ranks begin, left out."""
    block = torch.ones(_SMALL, dtype=torch.uint8, device=clock.device)
    few, many = (lap(transport, block, peers, calls) for calls in (CALLS, 3 * CALLS))
    few(), many()
    shorter, longer = clock.medians([few, many])
    return (longer - shorter) / (2 * CALLS) if longer > shorter else longer / (3 * CALLS)
