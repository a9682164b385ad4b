"""Test exchanges of bytes between ranks through a store, and the comparison of new calls."""

from __future__ import annotations

import signal
import time

import pytest
import torch.distributed as dist

from burst_portable.comm.agreement import agree, call_signature
from burst_portable.comm.base import Transport
from burst_portable.comm.faults import NoteExchange
from burst_portable.comm.local import run_transports
from burst_portable.comm.torch_dist import StoreExchange
from burst_portable.errors import CommunicationTimeoutError, MismatchError


class ByStore(Transport):
    """A transport that cannot send host memory. It agrees as NCCL does, without NCCL."""

    host = False

    def __init__(self, rank: int, size: int, store: dist.Store, timeout: float = 5.0) -> None:
        super().__init__("store", rank, size)
        self.asked = 0
        self._board, self._timeout = StoreExchange(store, rank, size), timeout

    def post(self, sends, receives, label=""):
        raise AssertionError("no message is sent here")

    def share(self, data, label="share", timeout=None):
        self.asked += 1
        return self._board.share(data, f"rank {self.rank}, {label}", timeout or self._timeout)


def over_store(size, work, **options):
    store = dist.HashStore()
    return run_transports(size, lambda local: work(ByStore(local.rank, size, store, **options)))


def test_store_exchange_shares_and_deletes_keys():
    store = dist.HashStore()

    def work(local):
        board = StoreExchange(store, local.rank, 3)
        return [board.share(bytes([turn, local.rank]), "sharing", 5.0) for turn in range(50)]

    for heard in run_transports(3, work):
        assert heard == [[bytes([turn, rank]) for rank in range(3)] for turn in range(50)]
    assert store.num_keys() <= 3 * 3


def test_store_exchange_names_silent_rank():
    def work(transport):
        if transport.rank == 1:
            return
        with pytest.raises(CommunicationTimeoutError, match=r"rank 1 shared nothing in 0\.2 s.*BURST_TIMEOUT"):
            agree(transport, call_signature({"a": "b"}))

    over_store(3, work, timeout=0.2)


def test_agreement_compares_each_call_once():
    def work(transport):
        for _ in range(5):
            for fact in ("b", "c"):
                agree(transport, call_signature({"a": fact}))
        return transport.asked, transport.state.passes

    assert over_store(3, work) == [(2, 10)] * 3


def test_mismatched_calls_raise_each_time():
    def work(transport):
        agree(transport, call_signature({"dtype": "float32"}))
        for _ in range(2):
            with pytest.raises(MismatchError, match=r"float32 on rank 0.*float16 on rank 1"):
                agree(transport, call_signature({"dtype": "float16" if transport.rank else "float32", "more": "yes"}))

    over_store(2, work)


def test_note_exchange_without_process_group_ends():
    """Another thread may destroy the group before the store is read."""
    assert not dist.is_initialized()
    asking = NoteExchange([0, 1], "late")
    asking.run()
    assert asking.over.is_set()
    assert asking.notes == {}


class Interrupted(Exception):
    """A signal arrived."""


def interrupt(number, frame):
    raise Interrupted


def test_share_handles_signals_while_it_waits():
    """A launcher ends the ranks that wait for a lost one by a signal; a wait of the store would delay it."""
    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        started = time.monotonic()
        with pytest.raises(Interrupted):
            StoreExchange(dist.HashStore(), 0, 2).share(b"", "sharing", 60.0)
        assert time.monotonic() - started < 20
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
