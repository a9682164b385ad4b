"""Send messages through torch.distributed: NCCL, RCCL, HCCL, gloo.

If the process group launches kernels for messages, the messages of one post are one batch, so that no order of sends
and receives can deadlock. If it uses host threads, they are started one by one.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import lru_cache
from weakref import WeakKeyDictionary, WeakSet

import torch
import torch.distributed as dist
from torch import Tensor

from burst_portable.comm.base import Handle, Handles, Message, Transport
from burst_portable.comm.faults import TransferWatch, exchange_error_notes
from burst_portable.errors import LATE, CommunicationError, CommunicationTimeoutError, PeerLostError, first_line
from burst_portable.utils.torch_modes import is_capturing


def store_exchange(group: dist.ProcessGroup) -> StoreExchange:
    """Return the exchange of a group over the store that the group was made with."""
    store = dist.PrefixStore(f"burst_portable/{group.group_name}", group.get_group_store())
    return StoreExchange(store, dist.get_rank(group), dist.get_world_size(group))


class StoreExchange:
    """Exchange a few bytes between the ranks of a group through a store, which counts the turns of each rank.

    Only these ranks may use the store.
    """

    def __init__(self, store: dist.Store, rank: int, size: int) -> None:
        self._store, self._rank, self._size = store, rank, size

    def share(self, data: bytes, what: str, timeout: float) -> list[bytes]:
        """Return the data that every rank shared at this turn, in rank order. `what` describes it in errors.

        Raises:
            CommunicationTimeoutError: Ranks shared nothing in `timeout` seconds; the message names them.
            PeerLostError: The store cannot be reached.
        """
        until = time.monotonic() + timeout
        turn = -1  # unknown
        try:
            turn = self._store.add(f"turns/{self._rank}", 1) - 1
            self._store.set(f"{turn}/{self._rank}", data)  # type: ignore[arg-type]  # bytes need not be text
            if turn > 1:  # all ranks have shared at the last turn, so they have read the turn before it
                self._store.delete_key(f"{turn - 2}/{self._rank}")
            return [self._read(f"{turn}/{rank}", until) for rank in range(self._size)]
        except RuntimeError as error:
            raise self._error(error, turn, what, timeout) from error

    def _read(self, key: str, until: float) -> bytes:
        """Return the value of a key. A wait of the store delays Python's signal handlers, so each is short."""
        while (left := until - time.monotonic()) > _STORE_WAIT:
            started = time.monotonic()
            try:
                self._store.wait([key], timedelta(seconds=_STORE_WAIT))
                return bytes(self._store.get(key))
            except RuntimeError:
                if time.monotonic() - started < _STORE_WAIT / 2:  # not a timeout: the store is lost
                    raise
        self._store.wait([key], timedelta(seconds=max(0.001, left)))
        return bytes(self._store.get(key))

    def _error(self, error: RuntimeError, turn: int, what: str, timeout: float) -> CommunicationError:
        text = first_line(error)
        try:
            missing = [rank for rank in range(self._size) if not self._store.check([f"{turn}/{rank}"])]
        except RuntimeError:
            return PeerLostError(f"{what} failed", got=text, next_step="look at the output of rank 0")
        who = ", ".join(map(str, missing)) or "the store"
        wrong = f"{what}: rank {who} shared nothing in {timeout:g} s"
        return CommunicationTimeoutError(wrong, got=text, next_step=LATE)


_STORE_WAIT = 1.0  # seconds of one wait of a store
_SHARE_SECONDS = 600.0  # default timeout for sharing bytes through the store


class _Transfer:
    """Handle of torch works, with their description in errors."""

    def __init__(self, works: Sequence[dist.Work], what: str, timeout: float | None, group: dist.ProcessGroup) -> None:
        self._works, self._what, self._timeout, self._group = works, what, timeout, group

    def wait(self) -> None:
        timeout = () if self._timeout is None else (timedelta(seconds=self._timeout),)
        try:
            for work in self._works:
                work.wait(*timeout)
        except RuntimeError as error:
            raise named_error(error, self._what, self._group) from error


def named_error(error: RuntimeError, what: str, group: dist.ProcessGroup) -> CommunicationError:
    """Return torch's error as a `CommunicationTimeoutError` or `PeerLostError`, with the notes of other ranks."""
    text = re.sub(r"^\[\S+\] ", "", first_line(error)).partition(". This is typically")[0]
    late = "timed out" in text.lower() or "timeout" in text.lower()
    kind, verb = (CommunicationTimeoutError, "took too long") if late else (PeerLostError, "failed")
    next_step = LATE if late else "look at the output of that rank"
    notes = exchange_error_notes(group, f"{what} {verb}")
    return kind(f"{what} {verb}", got=text, next_step="; ".join(filter(None, (notes, next_step))))


@lru_cache(maxsize=1)
def _transports() -> WeakKeyDictionary[dist.ProcessGroup, WeakSet[TorchDistTransport]]:
    """Return the transports of every process group."""
    return WeakKeyDictionary()


class TorchDistTransport(Transport):
    """See `comm.base.Transport`.

    Args:
        group: Process group of torch.distributed. None: the default group.
        name: torch's name of the group's backend: "gloo", "nccl" (also for RCCL), "hccl".
        batched: Whether the messages of one post are one batch.
        timeout: Seconds that a transfer may take. Default: the timeout of the group.
        in_watch: Called first in the thread that watches batched messages. Default: nothing.
        high_priority: Whether the group's kernels run on a stream of high priority.
    """

    keeps_received = True

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        name: str,
        *,
        batched: bool,
        timeout: float | None = None,
        in_watch: Callable[[], None] | None = None,
        high_priority: bool = False,
    ) -> None:
        found = group if group is not None else dist.group.WORLD
        assert found is not None, "a mesh cannot be made without one"
        super().__init__(name, dist.get_rank(found), dist.get_world_size(found))
        self.group, self._batched, self._timeout = found, batched, timeout
        self.host, self.high_priority = not batched, high_priority
        self._global_rank = dist.get_rank() if self.host else -1
        self._watch = TransferWatch(timeout, self._abort, in_watch) if batched and timeout else None
        self._connected = not batched or self.size == 1
        self._group_transports = _transports().setdefault(self.group, WeakSet())
        self._group_transports.add(self)

    def unfinished(self) -> str:
        """Return what is unfinished on any transport of this group: messages of several meshes would be mixed up."""
        return next(filter(None, (super(TorchDistTransport, one).unfinished() for one in self._group_transports)), "")

    def begin(self, digest: bytes = b"", bytes_per_sender: int = 0) -> None:
        super().begin(digest, bytes_per_sender)
        if not self._connected:
            self._connect()

    def _connect(self) -> None:
        """Exchange a byte with the neighbors.

        A group that launches kernels connects in its first batch, which waits for all ranks, even those without
        messages under the mask. More pairs would need more buffers.
        """
        byte = torch.zeros(1, dtype=torch.uint8, device=torch.accelerator.current_accelerator(check_available=True))
        send, receive = Message(byte, self.other_ranks[0]), Message(torch.empty_like(byte), self.other_ranks[-1])
        sends, receives = self.post([send], [receive], "connecting")
        for handle in (*receives, *sends):
            handle.wait()
        self._connected = True

    def post(self, sends: Sequence[Message], receives: Sequence[Message], label: str = "") -> Handles:
        if self._batched:
            return self._batch(sends, receives, label)
        return self._each(sends, receives, label, self._timeout)

    def share(self, data: bytes, label: str = "share", timeout: float | None = None) -> list[bytes]:
        if self.host:
            self._check_group()
        # If a rank is missing, the exchange stays active, and the next call raises.
        with self.between_passes():
            if self.host:
                return self._share_by_messages(data, label, self._timeout if timeout is None else timeout)
            seconds = timeout or self._timeout or _SHARE_SECONDS
            return store_exchange(self.group).share(
                data, f"rank {self.rank}, {label}: receiving from all ranks", seconds
            )

    def _check_group(self) -> None:
        """Raise `CommunicationError` if this rank has destroyed the group, whose connections may last longer.

        Ranks share before each pass over host threads. This takes 0.4 us; `dist.get_rank` takes 1.4 us.
        """
        try:
            dist.get_group_rank(self.group, self._global_rank)
        except ValueError as error:
            what = f"rank {self.rank}: this rank has destroyed the process group"
            raise CommunicationError(what, next_step="make a new Mesh of an existing one") from error

    def _share_by_messages(self, data: bytes, label: str, timeout: float | None) -> list[bytes]:
        """Share point to point: the error of a collective would not name the missing rank."""
        local = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        parts = [local if rank == self.rank else torch.empty_like(local) for rank in range(self.size)]
        sends, receives = (
            [Message(local, r) for r in self.other_ranks],
            [Message(parts[r], r) for r in self.other_ranks],
        )
        outgoing, incoming = self._each(sends, receives, label, timeout)
        for handle in (*incoming, *outgoing):
            handle.wait()
        return [bytes(part.numpy()) for part in parts]

    def _batch(self, sends: Sequence[Message], receives: Sequence[Message], label: str) -> Handles:
        ops = [dist.P2POp(dist.isend, m.buffer, group=self.group, group_peer=m.peer) for m in sends]
        ops += [dist.P2POp(dist.irecv, m.buffer, group=self.group, group_peer=m.peer) for m in receives]
        what = f"rank {self.rank}, {label}: exchange with ranks {sorted({m.peer for m in (*sends, *receives)})}"
        incoming = [m.buffer for m in receives]
        # While work is captured, no transfer runs yet, so none can be late.
        watch = self._watch if ops and not is_capturing(ops[0].tensor.device) else None
        post = watch.add(what, incoming) if watch else None
        try:
            works = dist.batch_isend_irecv(ops) if ops else []
        except RuntimeError as error:
            if watch and post:
                watch.remove(post)
            raise named_error(error, what, self.group) from error
        if post:
            post.works, post.ready = works, torch.Event(ops[0].tensor.device)
            post.ready.record()
        transfer = _Transfer(works, what, None, self.group)
        return [transfer] * len(sends), [transfer] * len(receives)

    def _abort(self, incoming: Sequence[Tensor]) -> None:
        """Fill receive buffers with NaN (255 in each byte, in every dtype), and end the group's kernels."""
        if incoming:
            device = incoming[0].device
            with torch.Stream(device):
                for buffer in incoming:
                    buffer.fill_(255)
                torch.accelerator.current_stream(device).synchronize()
        self.group.abort()

    def _each(
        self, sends: Sequence[Message], receives: Sequence[Message], label: str, timeout: float | None
    ) -> Handles:
        def start(action: str, operation: Callable[..., dist.Work | None], m: Message, **peer: int) -> Handle:
            what = f"rank {self.rank}, {label}: {action} rank {m.peer}"
            try:
                work = operation(m.buffer, group=self.group, **peer)
            except RuntimeError as error:
                raise named_error(error, what, self.group) from error
            assert work is not None, "this rank is a member of its group"
            return _Transfer([work], what, timeout, self.group)

        incoming = [start("receiving from", dist.irecv, m, group_src=m.peer) for m in receives]
        outgoing = [start("sending to", dist.isend, m, group_dst=m.peer) for m in sends]
        return outgoing, incoming
