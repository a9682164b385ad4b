"""Test peer memory of the cuda backend with a simulated driver, streams and symmetric memory.

Ranks are threads, and simulated streams execute each call at once. The tests show that both ends use the same bytes and
flags and that memory grows by agreement. They also check the errors for missing features. They show no order of work on
a device.
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
from tests.support.peer_machine import DEVICE, Driver, Stream, attention_is_right, run_two_ranks, two_gpus


@pytest.fixture
def machine(monkeypatch):
    return two_gpus(monkeypatch)


@pytest.mark.parametrize(
    "strategy", ["ring(transfer=direct)", "burst(transfer=direct)", "ulysses", "ulysses(head_groups=2)"]
)
def test_peer_copies_attention_matches_reference(machine, strategy):
    attention_is_right(machine, strategy)
    assert len(machine.allocated) == 2, "what the trial took is enough for this one"


def test_peer_copies_without_remote_flags_copy_flags(machine, monkeypatch):
    """The driver cannot set flags of peers; everything else stays."""

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
    attention_is_right(machine, "ring(transfer=direct)")
    assert len(machine.allocated) == 4, "two trials"


def test_peer_memory_is_allocated_once_per_size(machine):
    def work(rank, other, connect):
        transport = connect()
        for size in (4 << 20, 1 << 20, 4 << 20):
            transport.begin(b"call", size)
            transport.end()
        transport.close()

    run_two_ranks(machine, work)
    assert len(machine.allocated) == 2 * 2  # one of the trial and one of the first call, on each rank


def test_failed_inbox_allocation_raises_on_both_ranks(machine):
    machine.memory[1] = 8 << 20

    def work(rank, other, connect):
        transport = connect()
        with pytest.raises(CommunicationError, match=r"not every rank has .* rank 1: CUDA out of memory"):
            transport.begin(b"call", 64 << 20)

    run_two_ranks(machine, work)


def test_transport_recovers_after_failed_inbox_allocation(machine):
    """The failed call releases its memory: no rank may write to the old addresses."""
    machine.memory[1] = 8 << 20

    def work(rank, other, connect):
        transport = connect()
        for size, had in ((64 << 20, False), (1 << 20, True)):
            try:
                transport.begin(b"call", size)
            except CommunicationError:
                assert not had
                continue
            assert had
            assert _swapped(transport) == 1 - rank
            transport.end()

    run_two_ranks(machine, work)


def _swapped(transport):
    """Send the rank number to the other rank and return the received number."""
    peer = 1 - transport.rank
    came = transport.receive_buffer(256, DEVICE, peer)
    block = torch.full((256,), transport.rank, dtype=torch.uint8)
    _, (received,) = transport.post([Message(block, peer)], [Message(came, peer)], "swapping")
    received.wait()
    return int(came.max())


def test_different_inbox_sizes_raise_mismatch_error(machine):
    def work(rank, other, connect):
        transport = connect()
        with pytest.raises(MismatchError, match="inbox_bytes"):
            transport.begin(b"call", (8 + rank) << 20)

    run_two_ranks(machine, work)


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
            "tried and failed: rank 0: received other bytes",
        ),
        (
            lambda m, monkeypatch: monkeypatch.setattr(Driver, "copy", lambda *a: None),
            r"one number for different GPUs; let each rank see all of them \(CUDA_VISIBLE_DEVICES\)$",
        ),
    ],
)
def test_connect_raises_with_reason(machine, monkeypatch, change, reason):
    change(machine, monkeypatch)

    def work(rank, other, connect):
        with pytest.raises(UnsupportedError, match=reason):
            connect()

    run_two_ranks(machine, work)


def test_connect_raises_if_peer_rejected_its_call(machine):
    """The peer answers with another kind of message, so this rank does not wait."""

    def work(rank, other, connect):
        if rank:
            other.share(b"a statement of another kind", "checking that ranks agree")
        else:
            with pytest.raises(MismatchError, match="do not make the same call"):
                connect()

    run_two_ranks(machine, work)


def test_begin_raises_failure_found_by_watch(machine):
    def work(rank, other, connect):
        transport = connect()
        assert isinstance(transport, PeerCopyTransport)
        transport.memory.watch.failed = CommunicationTimeoutError(
            "rank 0, forward step 1: rank 1 has not sent its message in 5 s"
        )
        with pytest.raises(CommunicationTimeoutError, match="forward step 1"):
            transport.begin(b"call", 0)

    run_two_ranks(machine, work)


def test_watch_releases_call_in_inference_mode(machine):
    """The thread that releases waiting streams is not in inference mode."""

    def work(rank, other, connect):
        transport = connect()
        with torch.inference_mode():
            transport.begin(b"call", 8 << 20)
        transport.memory._release([(3, 7)])
        flags = transport.memory._read_flags()
        return flags[3], set(transport.memory.inbox(0, 4096).tolist())

    assert run_two_ranks(machine, work) == [(7, {255})] * 2


def test_begin_rejects_graph_capture(machine, monkeypatch):
    def work(rank, other, connect):
        transport = connect()
        other.share(b"here", "meeting")
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        for size in (0, 64 << 20):  # the second size would need more memory
            with pytest.raises(UnsupportedError, match=r"'nccl' when capturing graphs \(BURST_TRANSPORT"):
                transport.begin(b"call", size)
        other.share(b"here", "meeting")
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
        transport.begin(b"call", 0)  # no call had begun, so the next one is valid
        assert _swapped(transport) == 1 - rank
        transport.end()

    run_two_ranks(machine, work)


def test_local_copies_run_on_device_of_memory(machine, monkeypatch):
    """The handle of the default stream is 0 on all devices, and another one may be current."""
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
    memory.copy_local([Parts(torch.zeros(16), (Part(0, 0, 16, 0),))])
    assert copied == [0]


@pytest.mark.parametrize("by_copies", [False, True])
def test_wait_uses_stream_of_caller(machine, monkeypatch, by_copies):
    """The profiler waits on a separate stream; the compute stream must not wait then."""
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
