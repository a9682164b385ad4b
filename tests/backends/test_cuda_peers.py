"""Peer memory of the cuda backend, with the driver, streams and symmetric memory stood in for: the calls and addresses.

Ranks are threads and streams do at once what they are given, so what this shows is that both ends mean the same bytes
and flags, that memory grows by agreement, and what is said where something is missing. No order on a device is shown.
"""

from __future__ import annotations

import ctypes
import threading
import time
from types import SimpleNamespace

import pytest
import torch

import burst_portable as bp
from burst_portable.backends.cuda import driver as driver_module
from burst_portable.backends.cuda.peers import connection, push
from burst_portable.backends.cuda.peers import memory as peer_memory
from burst_portable.backends.cuda.peers import watch as peer_watch
from burst_portable.comm.base import Part, Parts
from burst_portable.comm.local import run_threads
from burst_portable.comm.peer_copy import PeerCopyTransport
from burst_portable.config import Config
from burst_portable.conformance.cases import Case
from burst_portable.conformance.tolerances import judge
from burst_portable.errors import CommunicationError, DeadlineError, MismatchError, UnsupportedError
from tests.spmd.attention import expected, make_inputs, on_one_rank

DEVICE = torch.device("cpu", 0)


class Event:
    def record(self, stream=None):
        """Happens at once."""

    def query(self):
        return True


class Stream:
    cuda_stream = 0

    def __init__(self, *arguments, **options):
        """Does at once what it is given."""

    def wait_event(self, event):
        assert isinstance(event, Event)


class Driver:
    """On the process's own memory. A wait gives up after a second: what a watch would end."""

    def set_flags(self, stream, addresses, value):
        for address in addresses:
            ctypes.c_uint32.from_address(address).value = value

    def wait_flags(self, stream, addresses, value):
        until = time.monotonic() + 1.0
        while any(ctypes.c_uint32.from_address(address).value != value for address in addresses):
            if time.monotonic() > until:
                return
            time.sleep(0.001)

    def copy(self, stream, target, source, size):
        ctypes.memmove(target, source, size)


@pytest.fixture
def machine(monkeypatch):
    """One host whose GPUs are threads; `machine.memory` is what a rank may allocate."""
    here = threading.local()
    made: dict[int, torch.Tensor] = {}
    met = threading.Barrier(2)
    machine = SimpleNamespace(memory=[1 << 40, 1 << 40], here=here, allocated=[])

    def allocate(size, strides, dtype, device):
        if size[0] > machine.memory[here.rank]:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate a lot")
        machine.allocated.append(size[0])
        made[here.rank] = torch.full(size, 255, dtype=dtype)
        return made[here.rank]

    def rendezvous(heap, group):
        met.wait(5)
        return SimpleNamespace(buffer_ptrs=[made[rank].data_ptr() for rank in range(2)])

    cuda = {
        "Stream": Stream,
        "Event": Event,
        "current_stream": lambda device=None: Stream(),
        "is_current_stream_capturing": lambda: False,
        "synchronize": lambda device=None: None,
        "get_device_properties": lambda device: SimpleNamespace(uuid=f"GPU-{here.rank}"),
    }
    for name, stand_in in cuda.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    symmetric = SimpleNamespace(_SymmetricMemory=SimpleNamespace(empty_strided_p2p=allocate), rendezvous=rendezvous)
    monkeypatch.setattr(peer_memory, "symmetric_memory", symmetric)
    monkeypatch.setattr(peer_memory, "driver", lambda index: Driver())
    monkeypatch.setattr(peer_memory, "current_stream", lambda device: torch.cuda.current_stream().cuda_stream)
    monkeypatch.setattr(peer_memory.dist, "get_rank", lambda group: here.rank)
    monkeypatch.setattr(peer_memory.dist, "get_world_size", lambda group: 2)
    monkeypatch.setattr(peer_watch.Watch, "_watch", lambda self: None)  # stand-ins never hang
    monkeypatch.setattr(connection, "unavailable", lambda: "")
    monkeypatch.setattr(connection, "here", lambda: DEVICE)
    return machine


def on_two(machine, work):
    """`work(rank, other, connect)` on two ranks."""

    def body(local):
        machine.here.rank = local.rank
        return work(local.rank, local, lambda: connection.connect(local, None, 5.0))

    return run_threads(2, body, deadline=5.0)


def attention_is_right(machine, strategy):
    case = Case(mask="causal", strategy=strategy, ranks=2, heads="8x4x8x8", batch=1, length=64)
    inputs = make_inputs(case)
    exact, plain = expected(case, inputs)

    def work(rank, other, connect):
        transport = connect()
        config = Config(deadline=5.0, transport="peer_copy")
        return on_one_rank(bp.Mesh(rank, 2, lambda device_type: transport, config=config), case, inputs)

    for answer in on_two(machine, work):
        assert judge(answer, exact, plain, case.dtype) == {}


@pytest.mark.parametrize("strategy", ["ring+fetch", "burst+fetch", "ulysses", "ulysses+groups"])
def test_attention(machine, strategy):
    attention_is_right(machine, strategy)
    assert len(machine.allocated) == 2, "what the trial took is enough for this one"


class Pushes:
    """Stands in for the compiled kernel of `push`: does what its parameters say, and counts the messages."""

    def __init__(self):
        self.launches = []

    def bound(self, grid, numbers):
        def launch(stream):
            sources, targets, sizes = (numbers[i : i + push._AT_ONCE] for i in range(0, len(numbers), push._AT_ONCE))
            self.launches.append(grid[1])
            for source, target, size in list(zip(sources, targets, sizes, strict=True))[: grid[1]]:
                ctypes.memmove(target, source, 16 * size)

        return launch


@pytest.fixture
def pushes(monkeypatch):
    made = Pushes()
    monkeypatch.setattr(push, "_compiled", lambda: made)
    monkeypatch.setattr(peer_memory, "pusher", push.Pusher)
    return made


@pytest.mark.parametrize("strategy", ["ulysses", "ulysses+groups"])
def test_what_is_exchanged_is_pushed(machine, pushes, monkeypatch, strategy):
    """All messages of an exchange in one launch, what stays among them; engines have nothing left to do."""
    real, copied = Driver.copy, []

    def counted(self, stream, target, source, size):
        copied.append(size)
        real(self, stream, target, source, size)

    monkeypatch.setattr(Driver, "copy", counted)
    attention_is_right(machine, strategy)
    groups = 2 if strategy.endswith("groups") else 1
    assert set(copied) == {1 << 20}, "the trial's, one by one"
    # Two ranks: the trial's exchange; forward there, out and LSE back; backward there, and dq, dk and dv back.
    assert sorted(pushes.launches) == sorted(2 * ([2] + groups * [2, 4, 2, 6]))


@pytest.mark.parametrize("longest", [0, 1 << 30])
@pytest.mark.parametrize("size", [4096, 4104])
def test_who_moves_what(machine, pushes, monkeypatch, longest, size):
    """Long messages, single ones and such as do not end at 16 bytes are the engines'."""
    monkeypatch.setattr(push, "LONGEST", longest)
    pushed = longest > 0 and size % 16 == 0

    def work(rank, other, connect):
        transport = connect()
        before = len(pushes.launches)
        for alone in (False, True):
            transport.begin(b"call", 2 * size)
            ranks = (rank,) if alone else (1 - rank, rank)
            inbox = transport.inbox(2 * size, DEVICE, rank, 0)
            block = torch.full((size,), 7 + rank, dtype=torch.uint8)
            exchange = transport.exchange(
                [Parts(block, tuple(Part(r, 0, size, rank * size) for r in ranks))],
                [Parts(inbox, tuple(Part(r, r * size, (r + 1) * size, r * size) for r in ranks))],
                "call",
            )
            exchange.wait()
            exchange.left()
            assert [int(inbox[r * size : (r + 1) * size].unique()) for r in ranks] == [7 + r for r in ranks]
            transport.end()
        return before

    on_two(machine, work)
    assert pushes.launches.count(2) == (2 if longest else 0) + 2 * pushed  # the trial's, and these
    assert pushes.launches.count(1) == 0


class _Operation(ctypes.Structure):
    """CUstreamBatchMemOpParams of a flag, as cuda.h has it."""

    _fields_ = (
        ("operation", ctypes.c_int),
        ("address", ctypes.c_uint64),
        ("value", ctypes.c_uint64),
        ("flags", ctypes.c_uint),
        ("alias", ctypes.c_uint64),
        ("rest", ctypes.c_uint64),
    )


def test_several_flags_are_one_call(monkeypatch):
    """One flag is a call of its own kind, several are packed as the driver reads them."""
    calls = []

    class Library:
        def __getattr__(self, name):
            def call(*arguments):
                calls.append((name, arguments))
                return 0

            return call

    monkeypatch.setattr(ctypes, "CDLL", lambda name: Library())
    driver = driver_module.Driver(0)
    calls.clear()
    for method, single, kind in (
        (driver.set_flags, "cuStreamWriteValue32_v2", 2),
        (driver.wait_flags, "cuStreamWaitValue32_v2", 1),
    ):
        method(9, [64], 5)
        assert calls.pop()[:1] == (single,)
        method(9, [64, 1 << 40, 72], 5)
        ((name, (stream, count, packed, flags)),) = calls
        assert (name, stream, count, flags) == ("cuStreamBatchMemOp_v2", 9, 3, 0)
        assert len(packed) == 3 * 48 == 3 * ctypes.sizeof(_Operation)
        read = (_Operation * 3).from_buffer_copy(packed)
        assert [(o.operation, o.address, o.value, o.flags & 1) for o in read] == [
            (kind, address, 5, kind & 1) for address in (64, 1 << 40, 72)
        ]
        calls.clear()
        method(9, [], 5)
        assert not calls


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
        (
            lambda m, monkeypatch: monkeypatch.setattr(connection, "_host", lambda: f"host {m.here.rank}"),
            "several hosts",
        ),
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
        transport.memory.watch.failed = DeadlineError("rank 0, forward step 1: rank 1 has not sent its message in 5 s")
        with pytest.raises(DeadlineError, match="forward step 1"):
            transport.begin(b"call", 0)

    on_two(machine, work)


def test_graphs_are_refused(machine, monkeypatch):
    def work(rank, other, connect):
        transport = connect()
        other.share(b"here", "meeting")
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        with pytest.raises(UnsupportedError, match=r"'nccl' where graphs are captured \(BURST_TRANSPORT"):
            transport.begin(b"call", 0)

    on_two(machine, work)


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
