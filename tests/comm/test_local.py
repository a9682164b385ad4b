"""Test ranks with different calls, failed or late ranks, and an interrupted caller: each rank raises, and no thread
remains.
"""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest
import torch

import burst_portable as bp
from burst_portable.comm.base import Message
from burst_portable.comm.local import run_transports
from burst_portable.errors import CommunicationTimeoutError, LayoutError, MismatchError, PeerLostError


def test_rows_that_contradict_layout_raise():
    def work(mesh):
        rows = 9 if mesh.rank else 8
        return bp.attention(*(torch.randn(1, rows, 2, 4) for _ in range(3)), mesh=mesh, seq_len=16)

    with pytest.raises(LayoutError, match="rank 1 holds a different number of rows"):
        bp.run_threads(2, work)


def test_different_message_sizes_raise():
    def work(mesh):
        heads = 4 if mesh.rank else 2
        return bp.attention(*(torch.randn(1, 8, heads, 4) for _ in range(3)), mesh=mesh, strategy="ring", mask="full")

    with pytest.raises((MismatchError, PeerLostError), match="rank"):
        bp.run_threads(2, work)


def test_failed_rank_ends_other_ranks():
    def work(mesh):
        if mesh.rank == 1:
            raise ZeroDivisionError("rank 1 fell over")
        return bp.attention(*(torch.randn(1, 8, 2, 4) for _ in range(3)), mesh=mesh, strategy="ring", mask="full")

    with pytest.raises(ZeroDivisionError, match="fell over"):
        bp.run_threads(3, work)


def test_late_rank_is_named():
    given_up = threading.Event()

    def work(transport):
        if transport.rank == 1:
            given_up.wait(5)
            return
        _, (handle,) = transport.post([], [Message(torch.empty(8, dtype=torch.uint8), 1)], "step 3")
        try:
            handle.wait()
        finally:
            given_up.set()

    with pytest.raises(CommunicationTimeoutError, match=r"rank 0, step 3: nothing received from rank 1.*BURST_TIMEOUT"):
        run_transports(2, work, timeout=0.2)


def test_interrupt_ends_all_rank_threads():
    """A daemon thread inside torch at interpreter exit would abort the process."""
    begun, all_there = [], threading.Barrier(3)

    def work(mesh):
        begun.append(threading.current_thread())
        all_there.wait()
        if mesh.rank == 1:
            os.kill(os.getpid(), signal.SIGINT)
        mesh.transport("cpu").share(b"never said by rank 2") if mesh.rank < 2 else time.sleep(0.5)

    # the process that starts the tests may ignore the signal
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            bp.run_threads(3, work, timeout=30)
    finally:
        signal.signal(signal.SIGINT, before)
    for thread in begun:
        thread.join(1.0)  # its work is done; the thread itself ends a moment later
        assert not thread.is_alive()
