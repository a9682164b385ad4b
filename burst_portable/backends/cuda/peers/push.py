"""Short messages to several ranks at once, written by multiprocessors in one launch.

A copy engine takes messages one after the other, and 9 microseconds for each besides its bytes: between eight H200,
1 MiB goes at 86 GB/s, 64 MiB at 369. A kernel writes to all ranks together, and the host says so once. It needs
multiprocessors, so long messages are left to the engines.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from functools import cache
from importlib.util import find_spec
from itertools import islice

from burst_portable.backends.cuda.kernel_driver import Bound, Ready, kernel_driver, ready
from burst_portable.comm.base import Part, Parts

LONGEST = 16 << 20
"""Bytes of a message that is pushed, at most."""
_AT_ONCE = 24  # messages of a launch
_UNIT = 16  # bytes that a thread moves at once
_PROGRAMS = 16  # for each message
_KEPT = 512  # launches: memory comes from the same places again and again

Address = Callable[[Part], int]
"""Where a part goes."""


class Pusher:
    """Pushes into the memory of one set of ranks, whose addresses stay."""

    def __init__(self) -> None:
        self._compiled = cache(_compiled)
        self._launches: dict[Hashable, list[Bound]] = {}

    def __call__(self, stream: int, leaving: Sequence[Parts], address: Address) -> bool:
        """Whether all of it is on its way. Nothing is where it is long, odd, or a single message."""
        key = tuple([(one.buffer.data_ptr(), one.parts) for one in leaving])
        launches = self._launches.get(key)
        if launches is None:
            if len(self._launches) >= _KEPT:
                self._launches.clear()
            launches = self._launches[key] = self._made(leaving, address)
        for launch in launches:
            launch(stream)
        return bool(launches)

    def _made(self, leaving: Sequence[Parts], address: Address) -> list[Bound]:
        """The launches; none where others must do it."""
        messages = [
            (one.buffer.data_ptr() + part.start, address(part), part.stop - part.start)
            for one in leaving
            for part in one.parts
        ]
        if len(messages) < 2 or max(size for _, _, size in messages) > LONGEST:
            return []
        if any((source | target | size) % _UNIT for source, target, size in messages):
            return []
        compiled = self._compiled()
        return [] if compiled is None else [compiled.bound(*_launch(some)) for some in _batches(messages)]


def pusher() -> Pusher | None:
    """None where there is no Triton, or no way to launch its kernels on a stream of one's own."""
    return None if find_spec("triton") is None or kernel_driver() is None else Pusher()


Message = tuple[int, int, int]
"""(source, target, bytes)."""


def _batches(messages: list[Message]) -> Iterator[list[Message]]:
    rest = iter(messages)
    while some := list(islice(rest, _AT_ONCE)):
        yield some


def _launch(messages: list[Message]) -> tuple[tuple[int, int, int], list[int]]:
    """Its grid and its parameters."""
    spare = [(0, 0, 0)] * (_AT_ONCE - len(messages))
    sources, targets, sizes = zip(*messages, *spare, strict=True)
    return (_PROGRAMS, len(messages), 1), [*sources, *targets, *[size // _UNIT for size in sizes]]


def _compiled() -> Ready | None:
    """For the current device; it is compiled now."""
    import torch

    from burst_portable.backends.cuda.peers.push_kernel import push_kernel

    pointers, sizes = [torch.int32] * (2 * _AT_ONCE), [1 << 10] * _AT_ONCE
    kernel = push_kernel.warmup(*pointers, *sizes, grid=(1,), num_warps=8)
    kernel[(1, 1, 1)]  # so that the driver has it
    return ready(kernel_driver(), kernel, [0] * (3 * _AT_ONCE))
