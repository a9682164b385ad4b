"""Test exchanges over peer copies that use one kernel launch, and flags that use one driver call.

The kernel and the machine are simulated: see `peer_machine`. The kernel itself runs in Triton's interpreter, in
`tests/support/triton_checks.py`.
"""

from __future__ import annotations

import ctypes
import re

import pytest
import torch

from burst_portable.backends.cuda import driver as driver_module
from burst_portable.backends.cuda.driver import packing
from burst_portable.backends.cuda.peers import memory as peer_memory
from burst_portable.backends.cuda.peers import push
from burst_portable.comm.base import Part, Parts, Strip
from burst_portable.errors import CommunicationError, UnsupportedError
from tests.support.peer_machine import DEVICE, Driver, attention_is_right, run_two_ranks, two_gpus


@pytest.fixture
def machine(monkeypatch):
    return two_gpus(monkeypatch)


def batched(numbers):
    """Group the numbers in tuples of six, one per message."""
    return zip(*[iter(numbers)] * 6, strict=True)


class Pushes:
    """Simulate the compiled kernel of `push`: execute its parameters and count the messages."""

    def __init__(self):
        self.launches = []

    def bound(self, grid, numbers):
        def launch(stream):
            self.launches.append(grid[1])
            for source, target, size, width, step, jump in list(batched(numbers))[: grid[1]]:
                for line in range(size // width):
                    ctypes.memmove(target + 16 * line * jump, source + 16 * line * step, 16 * width)

        return launch


@pytest.fixture
def pushes(monkeypatch):
    made = Pushes()
    monkeypatch.setattr(peer_memory, "pusher", lambda: push.Pusher(lambda: made))
    return made


@pytest.mark.parametrize("strategy", ["ulysses", "ulysses(head_groups=2)"])
def test_push_kernel_moves_exchanges(machine, pushes, monkeypatch, strategy):
    """Send all messages of an exchange, local parts included, in one launch; copy engines move none.

    With head groups, copy engines move messages that overlap a kernel. The kernel pushes the local parts, on the
    compute stream.
    """
    copied = []

    class Counting(Driver):
        def copy(self, stream, target, source, size):
            copied.append((1, size))
            super().copy(stream, target, source, size)

        def copy_lines(self, stream, target, source, strip):
            copied.append((strip.lines, strip.width))
            super().copy_lines(stream, target, source, strip)

    monkeypatch.setattr(peer_memory, "driver", lambda index: Counting())
    attention_is_right(machine, strategy)
    trial = [(1, 1 << 20), (256, 1024)]
    copied = [size for size in copied if size not in trial]
    # Two ranks: the exchanges of the trial; q, k, v sent and out, LSE returned; dO sent and dq, dk, dv returned.
    launches = [2, 2, 6, 4, 2, 6]
    if strategy == "ulysses":
        assert not copied
    else:
        # q, k, v of the second group and out, LSE of the first; then dO, with its local part as a message; then dq, dk,
        # dv.
        launches += [3, 2, 3]
        assert len(copied) == 2 * (3 + 2 + 2 + 3)
    assert sorted(pushes.launches) == sorted(2 * launches)


@pytest.mark.parametrize("broken", [{0, 1}, {1}])
def test_push_kernel_that_fails_to_compile_is_not_used(machine, monkeypatch, broken):
    """If one rank fails in the trial, copy engines move all messages on both."""
    made = Pushes()

    def compiled():
        if machine.here.rank in broken:
            raise FileNotFoundError("no such file: ptxas")
        return made

    monkeypatch.setattr(peer_memory, "pusher", lambda: push.Pusher(compiled))
    attention_is_right(machine, "ulysses")
    assert made.launches == [2] * (2 - len(broken)), "the first trial's"
    assert len(machine.allocated) == 4, "two trials"


@pytest.mark.parametrize("how", ["refused", "wrong"])
def test_connect_raises_if_engines_cannot_copy_lines(machine, pushes, monkeypatch, how):
    """The trial detects this before any message needs strided copies."""

    def copy_lines(self, stream, target, source, strip):
        if how == "refused":
            raise CommunicationError("a call of the CUDA driver failed; got invalid argument")

    monkeypatch.setattr(Driver, "copy_lines", copy_lines)

    def work(rank, other, connect):
        with pytest.raises(
            UnsupportedError, match=r"tried and failed: rank 0: .*(invalid argument|received other bytes)"
        ):
            connect()

    run_two_ranks(machine, work)


def test_push_and_flags_use_device_of_memory(machine, pushes, monkeypatch):
    """Handles of streams may be 0 on both devices, whichever is current."""
    now, started = [0], []

    class Device:
        def __init__(self, device):
            self.device, self.before = device, now[0]

        def __enter__(self):
            now[0] = self.device.index

        def __exit__(self, *_):
            now[0] = self.before

    class Noting(Driver):
        def set_flags(self, stream, addresses, value):
            started.append(("set", now[0]))

        def wait_flags(self, stream, addresses, value):
            started.append(("wait", now[0]))

    def bound(grid, numbers):
        return lambda stream: started.append(("push", now[0]))

    monkeypatch.setattr(peer_memory, "driver", lambda index: Noting())
    monkeypatch.setattr(torch.cuda, "current_device", lambda: now[0])
    monkeypatch.setattr(torch.cuda, "device", Device)
    monkeypatch.setattr(pushes, "bound", bound)
    machine.here.rank = 0
    memory = peer_memory.CudaPeerMemory(None, torch.device("cpu", 3), lambda data, what: [data], 5.0)
    memory._starts = [0, 1 << 20]
    memory.enter()
    memory.signal([(1, 0)], 1, copying=False)
    memory.copy([Parts(torch.zeros(64, dtype=torch.uint8), (Part(1, 0, 32, 0), Part(0, 32, 64, 0)))], exclusive=True)
    memory.wait([0], 1, None, copying=False)
    assert (started, now) == ([("set", 3), ("push", 3), ("wait", 3)], [0])


@pytest.mark.parametrize("alone", [False, True])
@pytest.mark.parametrize("size", [4096, 4104])
def test_push_moves_only_aligned_exchanges_without_kernel(machine, pushes, size, alone):
    """Copy engines move messages that overlap kernels, single ones and unaligned ones."""
    pushed = alone and size % 16 == 0

    def work(rank, other, connect):
        transport = connect()
        before = len(pushes.launches)
        for single in (False, True):
            transport.begin(b"call", 2 * size)
            ranks = (rank,) if single else (1 - rank, rank)
            received = transport.receive_buffer(2 * size, DEVICE, rank, 0)
            block = torch.full((size,), 7 + rank, dtype=torch.uint8)
            exchange = transport.exchange(
                [Parts(block, tuple(Part(r, 0, size, rank * size) for r in ranks))],
                [Parts(received, tuple(Part(r, r * size, (r + 1) * size, r * size) for r in ranks))],
                "call",
                exclusive=alone,
            )
            exchange.copy_local()
            exchange.wait()
            exchange.wait_sent()
            assert [int(received[r * size : (r + 1) * size].unique()) for r in ranks] == [7 + r for r in ranks]
            transport.end()
        return before

    run_two_ranks(machine, work)
    assert pushes.launches.count(2) == 4 + 2 * pushed  # those of the trial and those of this test
    assert pushes.launches.count(1) == 0


def test_push_launch_is_packed_as_ptx_declares():
    """Sources, targets and sizes are at the offsets of the compiled kernel's PTX."""
    pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    from burst_portable.backends.cuda.peers.push_kernel import push_kernel

    types = {"messages": (("i64",) * 2 + ("i32",) * 4,) * push.AT_ONCE, "BLOCK": "constexpr"}
    source = ASTSource(push_kernel, types, {"BLOCK": 1024})
    ptx = compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 8}).asm["ptx"]
    wide = re.findall(r"\.param \.[ub](32|64)", ptx.split(".entry", 1)[1].split(")", 1)[0])
    places = [(0, 0)]
    for size in (int(bits) // 8 for bits in wide):  # a parameter is aligned to its size
        places.append((-(-sum(places[-1]) // size) * size, size))
    at_once = push.AT_ONCE
    messages = [(1 << 40 | i << 4, 1 << 41 | i << 4, *(16 * (8 * i + n) for n in range(4))) for i in range(at_once - 1)]
    grid, numbers = push._launch(messages)
    packed = packing(numbers, places[1:]).form.pack(*numbers, 0, 0)
    read = [int.from_bytes(packed[start : start + size], "little") for start, size in places[1:]]
    sent = [n for source, target, *counts in messages for n in (source, target, *(c // 16 for c in counts))]
    assert read == [*sent, *[0] * 6, 0, 0]
    assert grid[1:] == (at_once - 1, 1)
    for what in ("ld", "st"):
        assert re.search(rf"{what}\.global\.v4", ptx), "16 bytes at once"


@pytest.fixture
def noting(monkeypatch):
    """Return a driver over a library without effects, and the list of its calls: (name, arguments)."""
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
    return driver, calls


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


def test_several_flags_are_one_driver_call(noting):
    """A single flag has its own call; several are packed in one."""
    driver, calls = noting
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


class _Copy(ctypes.Structure):
    """CUDA_MEMCPY2D, as cuda.h has it."""

    _side = (
        ("x", ctypes.c_size_t),
        ("y", ctypes.c_size_t),
        ("kind", ctypes.c_uint),
        ("host", ctypes.c_void_p),
        ("address", ctypes.c_uint64),
        ("array", ctypes.c_void_p),
        ("pitch", ctypes.c_size_t),
    )
    _fields_ = (
        *((f"source_{name}", kind) for name, kind in _side),
        *((f"target_{name}", kind) for name, kind in _side),
        ("width", ctypes.c_size_t),
        ("height", ctypes.c_size_t),
    )


def test_copy_lines_packs_driver_structure(noting):
    driver, calls = noting
    driver.copy_lines(9, 1 << 41, 1 << 40, Strip(1, 0, 0, lines=7, width=64, step=4096, jump=192))
    ((name, (packed, stream)),) = calls
    assert (name, stream, len(packed)) == ("cuMemcpy2DAsync_v2", 9, ctypes.sizeof(_Copy))
    read = _Copy.from_buffer_copy(packed)
    told = {name: getattr(read, name) for name, _ in _Copy._fields_ if getattr(read, name)}
    both = {"source_kind": 2, "source_address": 1 << 40, "source_pitch": 4096}
    both |= {"target_kind": 2, "target_address": 1 << 41, "target_pitch": 192}
    assert told == both | {"width": 64, "height": 7}
