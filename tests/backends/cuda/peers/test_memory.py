"""Peer memory of the cuda backend, with the driver, streams and symmetric memory stood in for: the calls and addresses.

Ranks are threads and streams do at once what they are given, so what this shows is that both ends mean the same bytes
and flags, that memory grows by agreement, and what is said where something is missing. No order on a device is shown.
"""

from __future__ import annotations

import ctypes
from types import SimpleNamespace

import pytest
import torch

from burst_portable.backends.cuda.peers import connection
from burst_portable.backends.cuda.peers import memory as peer_memory
from burst_portable.comm.base import Message, Part, Parts
from burst_portable.comm.peer_copy import PeerCopyTransport
from burst_portable.errors import CommunicationError, CommunicationTimeoutError, MismatchError, UnsupportedError
from tests.support.peer_machine import DEVICE, Driver, Stream, attention_is_right, on_two, two_gpus


@pytest.fixture
def machine(monkeypatch):
    return two_gpus(monkeypatch)


@pytest.mark.parametrize("strategy", ["ring+fetch", "burst+fetch", "ulysses", "ulysses+groups"])
def test_attention(machine, strategy):
    attention_is_right(machine, strategy)
    assert len(machine.allocated) == 2, "what the trial took is enough for this one"


def test_a_driver_that_cannot_set_flags_of_peers(machine, monkeypatch):
    """Then they are copied there, and everything else stays as it is."""

    def only_its_own(self, stream, addresses, value):
        if not machine.own.issuperset(addresses):
            raise CommunicationError("a call of the CUDA driver failed; got invalid argument")
        for address in addresses:
            ctypes.c_uint32.from_address(address).value = value

    real = torch.zeros
    machine.own = set()

    def zeros(*size, **options):
        made = real(*size, **options)
        if size == (2,):
            machine.own |= {made.data_ptr(), made.data_ptr() + 4}
        return made

    monkeypatch.setattr(Driver, "set_flags", only_its_own)
    monkeypatch.setattr(torch, "zeros", zeros)
    attention_is_right(machine, "ring+fetch")
    assert len(machine.allocated) == 4, "two trials"


def test_memory_is_taken_once_for_calls_of_a_size(machine):
    def work(rank, other, connect):
        transport = connect()
        for inbox in (4 << 20, 1 << 20, 4 << 20):
            transport.begin(b"call", inbox)
            transport.end()
        transport.close()

    on_two(machine, work)
    assert len(machine.allocated) == 2 * 2  # the trial's, and that of the first call


def test_a_rank_without_memory_is_an_error_on_both(machine):
    machine.memory[1] = 8 << 20

    def work(rank, other, connect):
        transport = connect()
        with pytest.raises(CommunicationError, match=r"not every rank has .* rank 1: CUDA out of memory"):
            transport.begin(b"call", 64 << 20)

    on_two(machine, work)


def test_transport_recovers_after_failed_inbox_allocation(machine):
    """The failed call releases its memory: no rank may write to the old addresses."""
    machine.memory[1] = 8 << 20

    def work(rank, other, connect):
        transport = connect()
        for inbox, had in ((64 << 20, False), (1 << 20, True)):
            try:
                transport.begin(b"call", inbox)
            except CommunicationError:
                assert not had
                continue
            assert had
            assert _swapped(transport) == 1 - rank
            transport.end()

    on_two(machine, work)


def _swapped(transport):
    """A byte from the other of two ranks, which is its number."""
    peer = 1 - transport.rank
    came = transport.inbox(256, DEVICE, peer)
    block = torch.full((256,), transport.rank, dtype=torch.uint8)
    _, (received,) = transport.post([Message(block, peer)], [Message(came, peer)], "swapping")
    received.wait()
    return int(came.max())


def test_ranks_that_ask_for_other_sizes_are_told(machine):
    def work(rank, other, connect):
        transport = connect()
        with pytest.raises(MismatchError, match="inbox"):
            transport.begin(b"call", (8 + rank) << 20)

    on_two(machine, work)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda m, monkeypatch: monkeypatch.setattr(connection, "unavailable", lambda: "no flags"), "rank 0: no flags"),
        (lambda m, monkeypatch: monkeypatch.setattr(m, "hosts", ["one host", "another host"]), "several hosts"),
        (
            lambda m, monkeypatch: monkeypatch.setattr(
                torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="GPU-0")
            ),
            "share a GPU",
        ),
        (
            lambda m, monkeypatch: monkeypatch.setattr(Driver, "copy", lambda *a: None),
            "tried and failed: rank 0: other bytes came",
        ),
    ],
)
def test_reasons_why_ranks_cannot_have_it(machine, monkeypatch, change, reason):
    change(machine, monkeypatch)

    def work(rank, other, connect):
        with pytest.raises(UnsupportedError, match=reason):
            connect()

    on_two(machine, work)


def test_a_rank_that_refused_its_call_meanwhile(machine):
    """It says so in the same conversation: no waiting, and no mixing up."""

    def work(rank, other, connect):
        if rank:
            other.share(b"a statement of another kind", "asking whether ranks agree")
        else:
            with pytest.raises(MismatchError, match="do not make the same call"):
                connect()

    on_two(machine, work)


def test_what_the_watch_found_is_raised(machine):
    def work(rank, other, connect):
        transport = connect()
        assert isinstance(transport, PeerCopyTransport)
        transport.memory.watch.failed = CommunicationTimeoutError(
            "rank 0, forward step 1: rank 1 has not sent its message in 5 s"
        )
        with pytest.raises(CommunicationTimeoutError, match="forward step 1"):
            transport.begin(b"call", 0)

    on_two(machine, work)


def test_a_call_in_inference_mode_that_nobody_answers_ends_too(machine):
    """The thread that lets streams go on is in no such mode."""

    def work(rank, other, connect):
        transport = connect()
        with torch.inference_mode():
            transport.begin(b"call", 8 << 20)
        transport.memory._release([(3, 7)])
        flags = transport.memory._read_flags()
        return flags[3], set(transport.memory.inbox(0, 4096).tolist())

    assert on_two(machine, work) == [(7, {255})] * 2


def test_graphs_are_refused(machine, monkeypatch):
    def work(rank, other, connect):
        transport = connect()
        other.share(b"here", "meeting")
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        for inbox in (0, 64 << 20):  # for which memory would have to grow, too
            with pytest.raises(UnsupportedError, match=r"'nccl' where graphs are captured \(BURST_TRANSPORT"):
                transport.begin(b"call", inbox)
        other.share(b"here", "meeting")
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
        transport.begin(b"call", 0)  # nothing has begun, so nothing is left of it
        assert _swapped(transport) == 1 - rank
        transport.end()

    on_two(machine, work)


def test_what_stays_on_a_rank_is_copied_on_its_device(machine, monkeypatch):
    """A default stream's handle is 0 on every device, and another one may be current."""
    current, copied = [0], []

    class At:
        def __init__(self, device):
            self.device = device

        def __enter__(self):
            self.before, current[0] = current[0], self.device.index

        def __exit__(self, *error):
            current[0] = self.before

    class Noting(Driver):
        def copy(self, stream, target, source, size):
            copied.append(current[0])

    monkeypatch.setattr(peer_memory, "driver", lambda index: Noting())
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current[0])
    monkeypatch.setattr(torch.cuda, "device", At)
    machine.here.rank = 0
    memory = peer_memory.CudaPeerMemory(None, DEVICE, lambda data, what: [data], 5.0)
    memory._starts = [0, 0]
    current[0] = 1
    memory.copy_own([Parts(torch.zeros(16), (Part(0, 0, 16, 0),))])
    assert copied == [0]


@pytest.mark.parametrize("by_copies", [False, True])
def test_another_stream_than_the_pass_s_waits_by_itself(machine, monkeypatch, by_copies):
    """As the profiler's does, which watches messages come: the stream that computes must not wait for them then."""
    asked = []

    class Noting(Driver):
        def wait_flags(self, stream, addresses, value):
            asked.append(stream)

    monkeypatch.setattr(peer_memory, "driver", lambda index: Noting())
    machine.here.rank = 0
    memory = peer_memory.CudaPeerMemory(None, DEVICE, lambda data, what: [data], 5.0, by_copies=by_copies)
    memory._starts = [0, 0]
    memory.enter()
    other = Stream()
    other.cuda_stream = 7
    memory.wait([0], 1, None, copying=False)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: other)
    memory.wait([0], 1, None, copying=False)
    assert asked == [0, 7]
