"""Simulate peer memory between threads: real inboxes and flags, a thread as copy stream, and random delays.

The current stream is the rank's own thread, which runs its work immediately.
"""

from __future__ import annotations

import queue
import random
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

import burst_portable as bp
from burst_portable.comm.base import Part, Parts, Strip, Strips
from burst_portable.comm.local import run_transports
from burst_portable.comm.peer_copy import PeerCopyTransport, flags
from burst_portable.config import Config
from burst_portable.errors import CommunicationTimeoutError


class World:
    """State shared by the ranks."""

    def __init__(self, size: int, *, timeout: float = 20.0, delay: float = 0.0, seed: int = 0) -> None:
        self.size, self.timeout, self.delay, self.seed = size, timeout, delay, seed
        self.changed = threading.Condition()
        self.inboxes: list[Tensor] = [torch.empty(0)] * size
        self.flags = [[0] * flags(size) for _ in range(size)]
        self.met = threading.Barrier(size)
        self.moved = [[0] * size for _ in range(size)]  # bytes, by source and target rank

    @property
    def copied(self) -> list[int]:
        """Return the bytes that each rank has sent to other ranks."""
        return [sum(to) for to in self.moved]


class ThreadPeers:
    """Implement `comm.peer_copy.PeerMemory`."""

    def __init__(self, world: World, rank: int) -> None:
        self.world, self.rank, self.size = world, rank, world.size
        self._chance = random.Random(1000 * world.seed + rank)
        self._failed: BaseException | None = None
        self._work: queue.Queue[Callable[[], None] | None] = queue.Queue()
        threading.Thread(target=self._copy_stream, daemon=True).start()

    def _copy_stream(self) -> None:
        while (work := self._work.get()) is not None:
            try:
                time.sleep(self._chance.random() * self.world.delay)
                work()
            except BaseException as error:  # noqa: BLE001  (raised by `check`)
                self._failed = error

    def _do(self, work: Callable[[], None], copying: bool) -> None:
        self._work.put(work) if copying else work()

    def reserve(self, inbox_bytes: int) -> None:
        self.world.met.wait(self.world.timeout)
        with torch.inference_mode(False):
            self.world.inboxes[self.rank] = torch.full((inbox_bytes,), 255, dtype=torch.uint8)
        self.world.flags[self.rank] = [0] * flags(self.size)
        self.world.met.wait(self.world.timeout)

    def inbox(self, offset: int, size: int) -> Tensor:
        return self.world.inboxes[self.rank][offset : offset + size]

    def enter(self) -> None:
        time.sleep(self._chance.random() * self.world.delay)

    def leave(self) -> None:
        """Do nothing: one thread runs all work in order."""

    def fork(self) -> None:
        """Do nothing: the earlier work of the thread is complete."""

    def copy(self, leaving: Sequence[Parts | Strips], *, exclusive: bool) -> None:
        for one in leaving:
            for part in one.parts:
                assert exclusive or part.peer != self.rank, "it would wait for the kernel, and messages behind it"
                self._do(partial(self._move, one.buffer, part), True)

    def copy_local(self, leaving: Sequence[Parts | Strips]) -> None:
        for one in leaving:
            for part in one.parts:
                assert part.peer == self.rank
                self._move(one.buffer, part)

    def _move(self, buffer: Tensor, part: Part | Strip) -> None:
        lines, width, step, jump = part[3:] if isinstance(part, Strip) else (1, *[part.size] * 3)
        assert width <= min(step, jump) <= max(step, jump) < 1 << 31, "what cuMemcpy2DAsync takes"
        memory = torch.empty(0, dtype=torch.uint8).set_(buffer.untyped_storage())
        at = buffer.storage_offset() * buffer.itemsize + part.start
        inbox = self.world.inboxes[part.peer]
        there = inbox.as_strided((lines, width), (jump, 1), part.offset)
        there.copy_(memory.as_strided((lines, width), (step, 1), at))
        self.world.moved[self.rank][part.peer] += part.size * (part.peer != self.rank)

    def sent(self) -> Done:
        done = Done(self)
        self._do(done.event.set, True)
        return done

    def signal(self, flags: Sequence[tuple[int, int]], mark: int, *, copying: bool) -> None:
        def work() -> None:
            with self.world.changed:
                for peer, flag in flags:
                    self.world.flags[peer][flag] = mark
                self.world.changed.notify_all()

        self._do(work, copying)

    def wait(self, flags: Sequence[int], mark: int, what: Callable[[int], str], *, copying: bool) -> None:
        def work() -> None:
            mine = self.world.flags[self.rank]
            with self.world.changed:
                if not self.world.changed.wait_for(
                    lambda: all(mine[flag] == mark for flag in flags), self.world.timeout
                ):
                    raise CommunicationTimeoutError(what(next(flag for flag in flags if mine[flag] != mark)))

        self._do(work, copying)

    def check(self) -> None:
        if self._failed is not None:
            raise self._failed

    def close(self) -> None:
        """End the thread after the copies that were started."""
        self._work.put(None)


class Done:
    """A handle of the work on the copy stream."""

    def __init__(self, memory: ThreadPeers) -> None:
        self._memory, self.event = memory, threading.Event()

    def wait(self) -> None:
        until = time.monotonic() + self._memory.world.timeout + 1
        while not self.event.wait(0.02):
            self._memory.check()
            assert time.monotonic() < until, "the copy stream is stuck"


def run_peers(world: World, work: Callable, peers: type[ThreadPeers] = ThreadPeers) -> list:
    """Run `work(mesh)` on ranks with peer copies and return the results in rank order."""

    def body(local):
        memory = peers(world, local.rank)
        transport = PeerCopyTransport(memory, local)
        config = Config(timeout=world.timeout)
        try:
            return work(bp.Mesh(local.rank, world.size, lambda device_type: transport, config=config))
        finally:
            memory.close()

    return run_transports(world.size, body, timeout=world.timeout)
