"""Write messages to several ranks in one kernel launch.

A copy engine takes messages one after the other, with a latency of 9 microseconds each: between eight H200, 1 MiB is
copied at 86 GB/s, 64 MiB at 369. A kernel writes to all ranks together, with one launch by the host. Strided lines are
no slower: 50 MB to each of three H200, in lines of 2 KiB, took 478 microseconds; copy engines took 715, and packing
first took 595. But a kernel needs multiprocessors. If attention occupies all of them, the messages start only when it
ends. So messages during attention are left to the copy engines.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import cache
from importlib.util import find_spec

from burst_portable.backends.cuda.driver import Bound, Ready, kernel_driver, ready
from burst_portable.comm.base import Part, Parts, Strip, Strips

AT_ONCE = 24
"""Messages in a launch."""

_NUMBERS = 6  # of a message
_UNIT = 16  # bytes that a thread moves at once
_PROGRAMS = 256  # for all messages of a launch
_KEPT = 4096  # launches, 4 KB each: tensors have the same addresses in every step, but other ones in every layer

Address = Callable[[Part | Strip], int]
"""The address to which a part goes."""


class Pusher:
    """Write into the memory of one set of ranks, whose addresses do not change."""

    def __init__(self, compile: Callable[[], Ready | None] | None = None) -> None:
        """`compile` returns the kernel, or None if it cannot be launched. Default: `compiled`."""
        self._compiled = cache(compiled if compile is None else compile)
        self._launches: dict[Hashable, list[Bound]] = {}

    def __call__(self, stream: int, leaving: Sequence[Parts | Strips], address: Address) -> bool:
        """Send all messages if possible, and return whether it was. Single or misaligned messages are not sent."""
        key = tuple((one.buffer.data_ptr(), one.parts) for one in leaving)
        launches = self._launches.get(key)
        if launches is None:
            if len(self._launches) >= _KEPT:
                self._launches.clear()
            launches = self._launches[key] = self._prepare(leaving, address)
        for launch in launches:
            launch(stream)
        return bool(launches)

    def _prepare(self, leaving: Sequence[Parts | Strips], address: Address) -> list[Bound]:
        """Return the launches; none if copy engines must copy."""
        messages = [_raw(one, part, address) for one in leaving for part in one.parts]
        if len(messages) < 2 or any(number % _UNIT for message in messages for number in message):
            return []
        compiled = self._compiled()
        starts = range(0, len(messages), AT_ONCE)
        return [] if compiled is None else [compiled.bound(*_launch(messages[i : i + AT_ONCE])) for i in starts]


def pusher() -> Pusher | None:
    """Return a pusher; None without Triton or `KernelDriver`."""
    return None if find_spec("triton") is None or kernel_driver() is None else Pusher()


RawMessage = tuple[int, int, int, int, int, int]
"""(source, target, bytes in total, bytes of a line, step between lines in source, step in target)."""


def _raw(one: Parts | Strips, part: Part | Strip, address: Address) -> RawMessage:
    """Return the addresses and sizes of a message. A contiguous part is one line."""
    lines = (part.width, part.step, part.jump) if isinstance(part, Strip) else (max(_UNIT, part.size), 0, 0)
    return one.buffer.data_ptr() + part.start, address(part), part.size, *lines


def _launch(messages: list[RawMessage]) -> tuple[tuple[int, int, int], list[int]]:
    """Return the grid and the parameters of a launch."""
    numbers = [n for source, target, *counts in messages for n in (source, target, *(c // _UNIT for c in counts))]
    spare = [0] * (_NUMBERS * AT_ONCE - len(numbers))
    return (max(1, _PROGRAMS // len(messages)), len(messages), 1), numbers + spare


def compiled() -> Ready | None:
    """Compile the kernel for the current device."""
    from burst_portable.backends.cuda.peers.push_kernel import push_kernel

    # Only the types matter, but Triton specializes for numbers that are 1 or divisible by 16.
    types = (1 << 40 | 1, 1 << 40 | 1, 1023, 1023, 1023, 1023)
    kernel = push_kernel.warmup((types,) * AT_ONCE, grid=(1,), num_warps=8)
    return ready(kernel_driver(), kernel, [0] * (_NUMBERS * AT_ONCE))
