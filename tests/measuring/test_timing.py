"""Test clocks, timed messages, timed kernels and the arithmetic of their times, mostly on a simulated clock."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest
import torch

import burst_portable as bp
from burst_portable.kernels.base import Kernel, Support
from burst_portable.measuring.measurement import measure_slowdown
from burst_portable.measuring.timing import (
    Block,
    Peers,
    TransportClock,
    fit_speed,
    lap,
    measure_curve,
    memory_bandwidth,
    message_latency,
    slowdown_share,
)
from tests.support.calls import kernel_call
from tests.support.simulated_clock import CPU, Machine, Simulated

# ------------------------------------------------------------------------------------------------ arithmetic


def test_fit_speed_separates_rate_and_latency():
    """0.25 s and 2 TFLOP/s: 1 TFLOP takes 0.75 s, and 16 take 8.25 s."""
    assert fit_speed((1e12, 0.75), (16e12, 8.25)) == (pytest.approx(2.0), pytest.approx(0.25), True)


@pytest.mark.parametrize(("fast", "slow"), [(1.0, 1.0), (1.0, 0.5), (0.01, 8.0)])
def test_fit_speed_of_inconsistent_times_has_no_latency(fast, slow):
    """The rate is that of the long call, and the latency near 0."""
    found = fit_speed((1e12, fast), (16e12, slow))
    assert (found.tflops, found.is_resolved) == (pytest.approx(16 / slow), False)
    assert 0 < found.latency <= 1e-6


def test_slowdown_share_clips_and_rejects():
    assert slowdown_share(4.0, 2.0, 5.0) == pytest.approx(0.5)
    assert slowdown_share(4.0, 2.0, 3.0) == 0.0  # clipped: together faster than alone is noise
    assert slowdown_share(4.0, 2.0, 7.0) == 1.0
    assert slowdown_share(2.0, 4.0, 4.5) is None  # longer messages would take as long without any kernel


def test_measure_slowdown_returns_none_for_long_messages():
    machine = Machine(kernel=1e-3, message=1.0, share=0.5)
    calls, peers = (machine.compute, machine.compute), Peers([1], [1])
    found, text = measure_slowdown(Simulated(machine), machine, *calls, torch.ones(8), peers)
    assert found is None
    assert text.endswith(": the kernels end too early to measure a slowdown")


def test_measure_curve_and_hop_measure_bandwidth_and_latency():
    """A message takes 1 ms and 1 ns per byte."""
    machine = Machine(message=1e-3, per_byte=1e-9)
    points = measure_curve(Simulated(machine), machine, Peers([1], [1]), (10**4, 10**6))
    assert points == ((10**4, pytest.approx(1e4 / 1.01e-3 / 1e9)), (10**6, pytest.approx(1e6 / 2e-3 / 1e9)))
    assert message_latency(Simulated(machine), machine, Peers([1], [1])) == pytest.approx(1e-3 + 256e-9)
    # To three other ranks at once: the bytes of all three together.
    spread = measure_curve(Simulated(machine), machine, Peers([1, 2, 3], [3, 2, 1]), (10**6,))
    assert spread == ((999_999, pytest.approx(999_999 / (3e-3 + 999_999e-9) / 1e9)),)


def test_measure_curve_sends_fewer_long_messages():
    """A lap has at most `lap_bytes`, but at least two messages; it must fit into peer memory."""
    begun: list[int] = []
    machine = Machine(per_byte=1e-9)
    machine.begin = lambda digest, bytes_per_sender: begun.append(bytes_per_sender)
    points = measure_curve(Simulated(machine), machine, Peers([1], [1]), (64, 512), lap_bytes=640)
    assert sorted(set(begun)) == [640, 1024]
    assert [intra_node_bandwidth for _, intra_node_bandwidth in points] == pytest.approx([1.0, 1.0])


def test_measure_curve_omits_sizes_of_slow_links():
    machine = Machine(per_byte=1.0)
    assert [size for size, _ in measure_curve(Simulated(machine), machine, Peers([1], [1]), (1, 2, 3))] == [1]


def test_block_measures_flops_of_exact_pairs():
    """2 ms per call and 1 GFLOP/s for 2 query heads of 4; backward has 2.5 times the FLOPs."""
    machine = Machine()

    class Planted(Kernel):
        name = "planted"

        def supports(self, call):
            return Support(True)

        def attend(self, q, k, v, tiles, call, *, state=None, yields_to_comm=False):
            assert state is None
            machine.now += 2e-3 + 4 * tiles.num_pairs * 2 * 4 / 1e9
            return torch.zeros(q.shape), torch.zeros(q.shape[0], q.shape[2], q.shape[1])

        def attend_backward(self, x, tiles, call, *, into):
            assert (x.delta is None) != (x.out is None)
            assert [total.shape for total in into] == [x.q.shape, x.k.shape, x.v.shape]
            machine.now += 2e-3 + 10 * tiles.num_pairs * 2 * 4 / 1e9

    call = kernel_call(torch.float32, "cpu", 2, 1, 4, 4, deterministic=False)
    points = []
    for length in (8, 32):
        block = Block(Planted(), call, length, CPU)
        assert block.flops["forward"] == 4 * length * (length + 1) // 2 * 2 * 4
        points.append((block.flops, block.seconds(Simulated(machine))))
    for name in ("forward", "backward"):
        found = fit_speed(*((flops[name], took[name]) for flops, took in points))
        assert found == (pytest.approx(1e-3), pytest.approx(2e-3), True)


def test_memory_bandwidth_counts_reads_and_writes():
    clock = SimpleNamespace(device=CPU, median=lambda call, calls: 0.5)
    assert memory_bandwidth(clock, 1 << 20) == pytest.approx(3 * (1 << 20) / 0.5 / 1e9)


def test_peers_within_and_between_nodes():
    assert Peers.next(3, 4) == Peers([0], [2])
    assert Peers.next(3, 8, 4) == Peers([0], [2])
    assert Peers.next(4, 8, 4) == Peers([5], [7])
    assert Peers.all_in_node(5, 8, 4) == Peers([6, 7, 4], [4, 7, 6])
    assert Peers.next_node(6, 8, 4) == Peers([2], [2])
    for rank in range(8):  # each target of this rank receives from it
        for make in (Peers.next, Peers.all_in_node, Peers.next_node):
            mine = make(rank, 8, 4)
            assert all(rank in make(other, 8, 4).sources for other in mine.targets)


class Device:
    """Simulate the events of a device that starts before its host is ready: `late` times, and then never again."""

    def __init__(self, monkeypatch, late: int) -> None:
        self.late, self.passes = late, []
        monkeypatch.setattr(torch, "Event", lambda enable_timing: self)
        monkeypatch.setattr(torch.accelerator, "synchronize", lambda: None)

    def record(self) -> None:
        pass

    def query(self) -> bool:
        self.late -= 1
        return self.late >= 0

    def elapsed_time(self, other) -> float:
        return 7.0  # ms


@pytest.mark.parametrize(("late", "passes"), [(0, 100), (1, 200), (3, 800), (4, 100), (99, 100)])
def test_clock_holds_device_until_host_is_ahead(monkeypatch, late, passes):
    """The hold gets longer with each attempt; if the host is never ahead, the last attempt counts.

    The next call is held again: only one call that waits for the device is timed without a hold.
    """
    device = Device(monkeypatch, late)
    transport = bp.Mesh.single().transport("cpu")
    clock = TransportClock(transport, CPU, streams=True, delay_bytes=1 << 10)  # a CPU takes many bytes slowly
    began = []
    assert clock.time(lambda: began.append(clock._delay[0].item()), 2) == pytest.approx(3.5e-3)
    tries = min(late, 4) + 1
    held = [sum(100 * 2**i for i in range(min(one, 3) + 1)) for one in range(tries)]
    assert began == [passes for passes in held for _ in range(2)], "what it was given before each try"
    assert clock._passes == passes
    assert clock.time(lambda: None, 1) == pytest.approx(7e-3)
    held_again = passes if late < 99 else sum(100 * 2**i for i in range(4))
    assert clock._delay[0] == held[-1] + held_again, "as long the next time, or from the beginning"
    assert device.late <= 0 or late == 99


# ------------------------------------------------------------------------------------------------ real ranks


def test_time_of_slowest_rank_counts_on_all():
    def work(mesh):
        clock = TransportClock(mesh.transport("cpu"), CPU, streams=False)
        return clock.time(lambda: time.sleep(0.05 * mesh.rank), 2)

    times = bp.run_threads(3, work)
    assert len(set(times)) == 1
    assert 0.1 <= times[0] < 1.0


def test_lap_sends_all_messages():
    def work(mesh):
        transport = mesh.transport("cpu")
        peers = Peers.all_in_node(mesh.rank, mesh.size)
        before = transport.fabric.sent[mesh.rank]
        lap(transport, torch.full((1000,), mesh.rank, dtype=torch.uint8), peers, 4)()
        return transport.fabric.sent[mesh.rank] - before

    assert bp.run_threads(3, work) == [4 * 2 * 1000] * 3
