"""Simulate driver, streams and symmetric memory for the peer memory of the cuda backend.

Ranks are threads, and streams run their work immediately.
"""

from __future__ import annotations

import ctypes
import threading
import time
from types import SimpleNamespace

import torch

import burst_portable as bp
from burst_portable.backends.cuda.peers import connection, memory, watch
from burst_portable.comm.local import run_transports
from burst_portable.config import Config
from burst_portable.conformance.cases import Case
from burst_portable.conformance.oracle import find_violations
from tests.support.attention_cases import expected, make_inputs, on_one_rank

DEVICE = torch.device("cpu", 0)


class Event:
    def record(self, stream=None):
        """Do nothing: the event happens at once."""

    def query(self):
        return True


class Stream:
    cuda_stream = 0

    def __init__(self, *arguments, **options):
        """Accept the arguments of a stream."""

    def wait_event(self, event):
        assert isinstance(event, Event)


class Driver:
    """Simulate the driver on memory of this process. A wait ends after one second, as a watch would end it."""

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

    def copy_lines(self, stream, target, source, strip):
        assert strip.width <= min(strip.step, strip.jump), "what cuMemcpy2DAsync takes"
        for line in range(strip.lines):
            ctypes.memmove(target + line * strip.jump, source + line * strip.step, strip.width)


def two_gpus(monkeypatch):
    """Simulate one host whose GPUs are threads. By rank: `memory` limits allocations, and `hosts` names the host."""
    here = threading.local()
    made: dict[int, torch.Tensor] = {}
    met = threading.Barrier(2)
    machine = SimpleNamespace(memory=[1 << 40, 1 << 40], hosts=["here", "here"], here=here, allocated=[])

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
        "current_device": lambda: 0,
        "current_stream": lambda device=None: Stream(),
        "is_current_stream_capturing": lambda: False,
        "synchronize": lambda device=None: None,
        "get_device_properties": lambda device: SimpleNamespace(uuid=f"GPU-{here.rank}"),
    }
    for name, stand_in in cuda.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    symmetric = SimpleNamespace(_SymmetricMemory=SimpleNamespace(empty_strided_p2p=allocate), rendezvous=rendezvous)
    monkeypatch.setattr(memory, "symmetric_memory", symmetric)
    monkeypatch.setattr(memory, "driver", lambda index: Driver())
    monkeypatch.setattr(memory, "current_stream", lambda device: torch.cuda.current_stream().cuda_stream)
    monkeypatch.setattr(memory.dist, "get_rank", lambda group: here.rank)
    monkeypatch.setattr(memory.dist, "get_world_size", lambda group: 2)
    idle = SimpleNamespace(wake=lambda owner: None, stop=lambda: None)
    monkeypatch.setattr(watch, "Background", lambda *_: idle)  # simulated memory never hangs
    monkeypatch.setattr(connection, "unavailable", lambda: "")
    monkeypatch.setattr(connection, "current_device", lambda: DEVICE)
    return machine


def run_two_ranks(machine, work):
    """Run `work(rank, other, connect)` on two ranks."""

    def body(local):
        machine.here.rank = local.rank
        return work(local.rank, local, lambda: connection.connect(local, None, 5.0, host=machine.hosts[local.rank]))

    return run_transports(2, body, timeout=5.0)


def attention_is_right(machine, strategy):
    case = Case(mask="causal", strategy=strategy, ranks=2, heads="8x4x8x8", batch=1, length=64)
    inputs = make_inputs(case)
    exact, plain = expected(case, inputs)

    def work(rank, other, connect):
        transport = connect()
        config = Config(timeout=5.0, transport="peer_copy")
        return on_one_rank(bp.Mesh(rank, 2, lambda device_type: transport, config=config), case, inputs)

    for answer in run_two_ranks(machine, work):
        assert find_violations(answer, exact, plain, case.dtype) == {}
