"""Define peer memory on NVIDIA GPUs of one host: torch's symmetric memory, copy engines, flags of the driver.

The stream waits for a flag without a kernel, so a message of a copy engine needs no multiprocessor while attention
occupies all of them. Only the messages of `push` need some. A stream has no timeout, so a thread has one (see `watch`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import _symmetric_memory as symmetric_memory

from burst_portable.backends.cuda.driver import current_stream, driver, on
from burst_portable.backends.cuda.peers.push import Pusher, pusher
from burst_portable.backends.cuda.peers.watch import Watch
from burst_portable.comm.base import Part, Parts, Strip, Strips
from burst_portable.comm.peer_copy import Watched, flags
from burst_portable.errors import SAME_CALLS, CommunicationError, MismatchError, UnsupportedError, first_line

_PAGE = 4096
_VIEWS = 4096  # kept at most

Share = Callable[[bytes, str], list[bytes]]
"""A few bytes of every rank, in rank order: `comm.base.Transport.share`."""


class CudaPeerMemory:
    """See `comm.peer_copy.PeerMemory`. A pass may wait `timeout` seconds for its next message.

    With `by_copies`, flags of peers are set by copies, a separate stream waits for flags, and no kernel sends. Every
    driver supports this; it takes two more calls per message.
    """

    def __init__(
        self, group: dist.ProcessGroup, device: torch.device, share: Share, timeout: float, *, by_copies: bool = False
    ) -> None:
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self._group, self._device, self._share = group, device, share
        self._driver = driver(device.index)
        self._copy_stream = torch.cuda.Stream(device, priority=-1)
        self._copy_handle = self._copy_stream.cuda_stream
        self._base = -(-4 * flags(self.size) // _PAGE) * _PAGE
        self._heap: Tensor | None = None
        self._mapping: Any = None
        self._starts: list[int] = []
        self._views: dict[Hashable, Tensor] = {}
        self._compute_stream = torch.cuda.current_stream(device)
        self._compute_handle = self._last_handle = self._compute_stream.cuda_stream
        self._forked, self._left = torch.cuda.Event(), torch.cuda.Event()
        self._wait_stream = torch.cuda.Stream(device) if by_copies else None
        self._marks = torch.zeros(2, dtype=torch.int32, device=device) if by_copies else None  # one per stream
        self._push = self._pusher()
        self.watch = Watch(device, timeout, self._read_flags, self._release)

    def reserve(self, inbox_bytes: int) -> None:
        _refuse_capture()
        torch.cuda.synchronize(self._device)
        self.check()
        self.watch.forget()  # then all ranks agree that no pass still uses the old memory
        self._agree({"inbox_bytes": inbox_bytes}, "giving up memory")
        self._views.clear()
        self._push = self._pusher()
        self._heap = self._mapping = None
        # Not `symmetric_memory.empty`: it keeps freed memory in a pool, and an inbox that has grown is never reused.
        allocate = symmetric_memory._SymmetricMemory.empty_strided_p2p
        what, failed = f"{inbox_bytes} bytes of peer memory", ""
        try:
            with torch.inference_mode(False):  # the watch writes to it after the call, outside of inference mode
                self._heap = allocate((self._base + inbox_bytes,), (1,), torch.uint8, self._device)
        except RuntimeError as error:  # includes torch's out-of-memory error and errors of the driver
            failed = first_line(error)
        replies = self._share(failed.encode(), f"allocating {what}")
        if bad := [f"rank {r}: {reply.decode(errors='replace')[:300]}" for r, reply in enumerate(replies) if reply]:
            raise CommunicationError(
                f"rank {self.rank}: not every rank has {what}",
                got="; ".join(bad),
                next_step="shorten the sequence, or set the transport to 'nccl'",
            )
        assert self._heap is not None
        self._mapping = symmetric_memory.rendezvous(self._heap, self._group)
        self._heap[: self._base].zero_()
        torch.cuda.synchronize(self._device)
        self._agree({"inbox_bytes": inbox_bytes}, "mapping memory")
        starts = self._mapping.buffer_ptrs
        within = self._heap.data_ptr() - starts[self.rank]  # the tensor may start inside the mapped range
        self._starts = [start + within for start in starts]

    def inbox(self, offset: int, size: int) -> Tensor:
        found = self._views.get((offset, size))
        if found is None:
            assert self._heap is not None, "memory is reserved before it is used"
            if len(self._views) >= _VIEWS:
                self._views.clear()
            start = self._base + offset
            found = self._views[offset, size] = self._heap[start : start + size]
        return found

    def enter(self) -> None:
        _refuse_capture()
        self._compute_stream = self.now()
        self._compute_handle = self._compute_stream.cuda_stream
        if self._compute_handle != self._last_handle:
            self._compute_stream.wait_event(self._left)
        self.watch.begin(self._compute_stream)

    def now(self) -> torch.cuda.Stream:
        """Return the current stream. torch would create a new object per call, which takes longer than a launch."""
        same = current_stream(self._device) == self._compute_handle
        return self._compute_stream if same else torch.cuda.current_stream(self._device)

    def leave(self) -> None:
        self._left = self.watch.end(self._compute_stream)
        self._last_handle = self._compute_handle

    def fork(self) -> None:
        self._forked.record(self._compute_stream)
        self._copy_stream.wait_event(self._forked)

    def copy(self, leaving: Sequence[Parts | Strips], *, exclusive: bool) -> None:
        self._copy(self._copy_handle, leaving, by_kernel=exclusive)

    def copy_local(self, leaving: Sequence[Parts | Strips]) -> None:
        self._copy(self._compute_handle, leaving, by_kernel=True)

    def _copy(self, stream: int, leaving: Sequence[Parts | Strips], *, by_kernel: bool) -> None:
        """Copy by a kernel if that is allowed and possible, else part by part, between devices by a copy engine."""
        with on(self._device):  # a kernel starts in the current device's context; streams are as in `signal`
            if by_kernel and self._push is not None and self._push(stream, leaving, self._address):
                return
            for one in leaving:
                source = one.buffer.data_ptr()
                for part in one.parts:
                    target = self._address(part)
                    if isinstance(part, Part):
                        self._driver.copy(stream, target, source + part.start, part.size)
                    elif part.size:
                        self._driver.copy_lines(stream, target, source + part.start, part)

    def _address(self, part: Part | Strip) -> int:
        """Return the address of a part in its rank's memory."""
        assert part.offset is not None, "parts that are copied have offsets"
        return self._starts[part.peer] + self._base + part.offset

    def sent(self) -> _Sent:
        return _Sent(self, self._copy_stream)

    def signal(self, flags: Sequence[tuple[int, int]], mark: int, *, copying: bool) -> None:
        stream = self._copy_handle if copying else self._compute_handle
        addresses = [self._starts[peer] + 4 * flag for peer, flag in flags]
        with on(self._device):  # a default stream has the handle 0 on every device, so the device must be current
            if self._marks is None:
                self._driver.set_flags(stream, addresses, mark)
                return
            own = self._marks.data_ptr() + 4 * copying
            self._driver.set_flags(stream, [own], mark)
            for address in addresses:
                self._driver.copy(stream, address, own, 4)

    def wait(self, flags: Sequence[int], mark: int, what: Watched, *, copying: bool) -> None:
        self.watch.expect(flags, mark, what)
        start = self._starts[self.rank]
        addresses = [start + 4 * flag for flag in flags]
        stream = self._copy_handle if copying else current_stream(self._device)
        if copying or self._wait_stream is None or stream != self._compute_handle:  # other streams wait directly
            with on(self._device):  # as in `signal`
                self._driver.wait_flags(stream, addresses, mark)
            return
        self._wait_stream.wait_event(_recorded(self._compute_stream))
        self._driver.wait_flags(self._wait_stream.cuda_stream, addresses, mark)
        self._compute_stream.wait_event(_recorded(self._wait_stream))

    def check(self) -> None:
        if self.watch.failed is not None:
            raise self.watch.failed

    def close(self) -> None:
        """Release the memory; every rank must call this."""
        if self._heap is not None and self.watch.failed is None:
            torch.cuda.synchronize(self._device)
            self._agree({"inbox_bytes": 0}, "giving up memory")
        self.watch.stop()
        self._views.clear()
        self._heap = self._mapping = None

    # ------------------------------------------------------------------------------- memory, and the watch

    def _pusher(self) -> Pusher | None:
        """Return a pusher for the current addresses; new memory needs a new one. None if flags go by copies."""
        return pusher() if self._wait_stream is None else None

    def _agree(self, facts: dict[str, Any], what: str) -> None:
        replies = self._share(json.dumps(facts).encode(), what)
        if any(reply != replies[0] for reply in replies):
            found = ", ".join(f"{reply[:200].decode(errors='replace')} on rank {r}" for r, reply in enumerate(replies))
            text = f"rank {self.rank}, {what}: the ranks do not make the same call"
            raise MismatchError(text, got=found, next_step=SAME_CALLS)

    def _read_flags(self) -> list[int]:
        """Return this rank's flags. The watch reads them on a separate stream."""
        assert self._heap is not None, "a pass has memory"
        numbers: list[int] = self._heap[: 4 * flags(self.size)].view(torch.int32).tolist()
        return numbers

    def _release(self, missing: list[tuple[int, int]]) -> None:
        """Set the flags for which streams wait, and fill the inbox with NaN of any dtype."""
        assert self._heap is not None, "a pass has memory"
        self._heap[self._base :].fill_(255)
        stream = torch.cuda.current_stream(self._device).cuda_stream
        for flag, mark in missing:
            self._driver.set_flags(stream, [self._starts[self.rank] + 4 * flag], mark)


def _refuse_capture() -> None:
    if torch.cuda.is_current_stream_capturing():
        raise UnsupportedError(
            "a CUDA graph cannot contain peer copies, which number their passes on the host",
            next_step="set the transport to 'nccl' when capturing graphs (BURST_TRANSPORT)",
        )


def _recorded(stream: torch.cuda.Stream) -> torch.cuda.Event:
    """Return an event after the work that a stream has been given so far."""
    event = torch.cuda.Event()
    event.record(stream)
    return event


class _Sent:
    """Handle of the work that the copy stream has been given so far."""

    __slots__ = ("_event", "_memory")

    def __init__(self, memory: CudaPeerMemory, stream: torch.cuda.Stream) -> None:
        self._memory, self._event = memory, _recorded(stream)

    def wait(self) -> None:
        self._memory.now().wait_event(self._event)
