"""Messages back to back between ranks: what links do, alone and beside something else."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from burst_portable.comm.base import Handle, Message, Transport
from burst_portable.measuring.arithmetic import gigabytes_a_second
from burst_portable.measuring.clock import Clock
from burst_portable.rates import Curve

CALLS = 10  # messages back to back
_ROOM = 640 << 20  # bytes of a lap: two long messages are enough, and peer memory must hold a lap of every rank
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


def curve(clock: Clock, transport: Transport, peers: Peers, sizes: Sequence[int]) -> Curve:
    """GB/s per rank in each direction by bytes: of a message, or of those to several ranks together."""
    points: list[tuple[int, float]] = []
    for size in sizes:
        each = max(1, size // len(peers.there))
        block = torch.ones(each, dtype=torch.uint8, device=clock.device)
        calls = max(2, min(CALLS, _ROOM // size))
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
