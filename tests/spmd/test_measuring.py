"""What `measure` makes of seconds, on clocks that are simulated by hand, and what it finds over real ranks."""

from __future__ import annotations

import json
import time
from types import SimpleNamespace

import pytest
import torch

import burst_portable as bp
from burst_portable.backends.registry import load, rates_of
from burst_portable.config import Config
from burst_portable.errors import DeviceError
from burst_portable.kernels.base import KernelProblem
from burst_portable.measuring import measurement as rates
from burst_portable.measuring import timing as clocks
from burst_portable.measuring import timing as links
from burst_portable.measuring.measurement import Shape, held_up, measure
from burst_portable.measuring.timing import (
    Block,
    Clock,
    Peers,
    TransportClock,
    curve,
    hop,
    lap,
    memory_rate,
    share_held_up,
    speed,
)
from burst_portable.planning.rates import Rates, as_json, read_rates

CPU = torch.device("cpu")


class Machine:
    """A rank whose time is a number: a kernel call takes so long, and a message so long over a link of its own.

    A kernel beside messages is kept waiting for a share of their time.
    """

    def __init__(self, *, kernel: float = 0.0, message: float = 0.0, per_byte: float = 0.0, share: float = 0.0) -> None:
        self.now = self.link = 0.0
        self.kernel, self.message, self.per_byte, self.share = kernel, message, per_byte, share

    def compute(self) -> None:
        beside = max(0.0, self.link - self.now)
        alone = self.kernel / (1 - self.share) if self.share < 1 else float("inf")
        self.now += min(alone, self.kernel + self.share * beside)

    # As a transport.

    def begin(self, digest: bytes, inbox: int) -> None:
        self.link = max(self.link, self.now)

    def inbox(self, size: int, device: torch.device, peer: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.uint8)

    def post(self, sends, receives, label):
        self.link += sum(self.message + self.per_byte * m.buffer.numel() for m in sends)
        return [self] * len(sends), [self] * len(receives)

    def wait(self) -> None:
        self.now = max(self.now, self.link)

    def end(self) -> None:
        pass


class Simulated(Clock):
    def __init__(self, machine: Machine) -> None:
        super().__init__(CPU, streams=False)
        self.machine = machine

    def time(self, call, calls):
        before = self.machine.now
        for _ in range(calls):
            call()
        return (self.machine.now - before) / calls

    def meet(self) -> None:
        pass

    def slowest(self, value: float) -> float:
        return value


# ------------------------------------------------------------------------------------------------ arithmetic


def test_two_lengths_tell_rate_and_latency():
    """0.25 s and 2 TFLOP/s: 1 TFLOP takes 0.75 s, 16 take 8.25 s."""
    assert speed((1e12, 0.75), (16e12, 8.25)) == (pytest.approx(2.0), pytest.approx(0.25), True)


@pytest.mark.parametrize(("fast", "slow"), [(1.0, 1.0), (1.0, 0.5), (0.01, 8.0)])
def test_lengths_that_tell_no_latency(fast, slow):
    """As fast, faster, or as if a launch took less than nothing: the long call's own rate, and a latency near none."""
    found = speed((1e12, fast), (16e12, slow))
    assert (found.tflops, found.apart) == (pytest.approx(16 / slow), False)
    assert 0 < found.latency <= 1e-6


def test_the_share_that_messages_hold_up():
    assert share_held_up(4.0, 2.0, 5.0) == pytest.approx(0.5)
    assert share_held_up(4.0, 2.0, 3.0) == 0.0  # clipped: together faster than alone is noise
    assert share_held_up(4.0, 2.0, 7.0) == 1.0
    assert share_held_up(2.0, 4.0, 4.5) is None  # longer messages would take as long without any kernel


@pytest.mark.parametrize("share", [0.0, 0.3, 0.9, 1.0])
@pytest.mark.parametrize(("kernel", "message"), [(1.0, 0.1), (0.1, 1.0), (1.0, 0.001), (1.0, 0.9)])
def test_what_a_machine_holds_up_is_found(share, kernel, message):
    machine = Machine(kernel=kernel, message=message, share=share)
    found, told = held_up(Simulated(machine), machine, machine.compute, machine.compute, torch.ones(8), Peers([1], [1]))
    assert found == pytest.approx(share)
    assert told.startswith("kernels ")


def test_what_cannot_be_told_is_kept(monkeypatch):
    """Messages that no number of kernels outlasts: the backend's share stays, and the file says so."""
    monkeypatch.setattr(rates, "held_up", lambda *_: (None, "planted"))

    def work(mesh):
        return measure(mesh, CPU, SMALL, "auto")

    facts = bp.run_local(2, work)[0]
    assert facts["rates"]["holds_up"] == rates_of(load("cpu"), 2).holds_up
    how = facts["how"]["holds_up"]
    assert not how["measured"]
    assert how["how"].startswith("forward: planted; backward: planted")
    assert "kept as it was: the guess of the backend cpu" in how["how"]


@pytest.mark.parametrize("known", [(0.0, 0.0), (0.9, 0.3)])
def test_where_messages_go_first_those_that_wait_are_not_said_to_hold_up_nothing(known, monkeypatch):
    """Where the backend knows nothing of them; what it knows stays."""
    monkeypatch.setattr(rates, "held_up", lambda *_: (0.25, "planted"))
    before = Rates(tflops=1.0, gbps=1.0, holds_up=known)
    monkeypatch.setattr(type(load("cpu")), "measured_rates", lambda *_: before, raising=False)

    def work(mesh):
        mesh.transport("cpu").goes_first = True
        return measure(mesh, CPU, SMALL, "auto")

    facts = bp.run_local(2, work)[0]
    assert facts["rates"]["holds_up_first"] == (0.25, 0.25)
    assert facts["how"]["holds_up_first"]["measured"]
    assert facts["rates"]["holds_up"] == (known if any(known) else (0.25, 0.25))
    assert not facts["how"]["holds_up"]["measured"]
    assert ("taken from holds_up_first" in facts["how"]["holds_up"]["how"]) is not any(known)


def test_messages_too_long_to_tell():
    machine = Machine(kernel=1e-3, message=1.0, share=0.5)
    found, told = held_up(Simulated(machine), machine, machine.compute, machine.compute, torch.ones(8), Peers([1], [1]))
    assert found is None
    assert told.endswith(": the kernels end too soon to tell")


def test_a_link_by_size():
    """A message takes 1 ms and 1 ns a byte."""
    machine = Machine(message=1e-3, per_byte=1e-9)
    points = curve(Simulated(machine), machine, Peers([1], [1]), (10**4, 10**6))
    assert points == ((10**4, pytest.approx(1e4 / 1.01e-3 / 1e9)), (10**6, pytest.approx(1e6 / 2e-3 / 1e9)))
    assert hop(Simulated(machine), machine, Peers([1], [1])) == pytest.approx(1e-3 + 256e-9)
    # To three others at once: bytes of all of them together.
    spread = curve(Simulated(machine), machine, Peers([1, 2, 3], [3, 2, 1]), (10**6,))
    assert spread == ((999_999, pytest.approx(999_999 / (3e-3 + 999_999e-9) / 1e9)),)


def test_long_messages_are_fewer(monkeypatch):
    """Ten that take the room of a lap, and never less than two: they have to fit into peer memory."""
    monkeypatch.setattr(links, "_ROOM", 640)
    begun: list[int] = []
    machine = Machine(per_byte=1e-9)
    machine.begin = lambda digest, inbox: begun.append(inbox)
    points = curve(Simulated(machine), machine, Peers([1], [1]), (64, 512))
    assert sorted(set(begun)) == [640, 1024]
    assert [gbps for _, gbps in points] == pytest.approx([1.0, 1.0])


def test_a_link_so_slow_that_larger_messages_are_left_out():
    machine = Machine(per_byte=1.0)
    assert [size for size, _ in curve(Simulated(machine), machine, Peers([1], [1]), (1, 2, 3))] == [1]


def test_the_kernel_of_a_block_by_exact_area():
    """A kernel that takes 2 ms a call and 1 GFLOP/s, of 2 query heads of 4: backward 2.5 times the FLOPs."""
    machine = Machine()

    class Planted:
        name = "planted"

        def attend(self, q, k, v, tiles, options, *, state=None):
            assert state is None
            machine.now += 2e-3 + 4 * tiles.area * 2 * 4 / 1e9
            return torch.zeros(q.shape), torch.zeros(q.shape[0], q.shape[2], q.shape[1])

        def attend_backward(self, dout, q, k, v, lse, tiles, options, *, delta=None, out=None, into):
            assert (delta is None) != (out is None)
            assert [x.shape for x in into] == [q.shape, k.shape, v.shape]
            machine.now += 2e-3 + 10 * tiles.area * 2 * 4 / 1e9

    problem = KernelProblem(torch.float32, "cpu", 2, 1, 4, 4, deterministic=False)
    points = []
    for length in (8, 32):
        block = Block(Planted(), problem, length, CPU)
        assert block.flops["forward"] == 4 * length * (length + 1) // 2 * 2 * 4
        points.append((block.flops, block.seconds(Simulated(machine))))
    for name in ("forward", "backward"):
        found = speed(*((flops[name], took[name]) for flops, took in points))
        assert found == (pytest.approx(1e-3), pytest.approx(2e-3), True)


def test_how_far_rounds_differ():
    """Of several calls that which differs most, and each time only what was measured since."""
    clock = Simulated(Machine())
    times = iter([1.0, 4.0, 3.0, 4.0, 2.0, 5.0])  # three rounds of two calls in turn
    clock.time = lambda call, calls: next(times)
    assert clock.medians([lambda: None] * 2, 1) == [2.0, 4.0]
    assert clock.varied() == 3.0
    assert clock.varied() == 1.0
    clock.time = lambda call, calls: 0.0  # a clock that is too coarse tells nothing
    assert clock.median(lambda: None) == 0.0
    assert clock.varied() == 1.0


def test_memory_counts_what_is_read_and_written():
    clock = SimpleNamespace(device=CPU, median=lambda call, calls: 0.5)
    assert memory_rate(clock, 1 << 20) == pytest.approx(3 * (1 << 20) / 0.5 / 1e9)


def test_peers_of_one_node_and_of_several():
    assert Peers.next(3, 4) == Peers([0], [2])
    assert Peers.next(3, 8, 4) == Peers([0], [2])
    assert Peers.next(4, 8, 4) == Peers([5], [7])
    assert Peers.others(5, 8, 4) == Peers([6, 7, 4], [4, 7, 6])
    assert Peers.next_node(6, 8, 4) == Peers([2], [2])
    for rank in range(8):  # who is sent to receives from us
        for make in (Peers.next, Peers.others, Peers.next_node):
            mine = make(rank, 8, 4)
            assert all(rank in make(other, 8, 4).back for other in mine.there)


class Device:
    """Events of a device that has begun before its host is done, so many times; then never again."""

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


@pytest.mark.parametrize(("late", "passes"), [(0, 100), (1, 200), (3, 800), (4, 0), (99, 0)])
def test_a_device_is_held_until_its_host_is_ahead(monkeypatch, late, passes):
    """For longer each time; a host that is never ahead counts in the end."""
    monkeypatch.setattr(clocks, "_HOLD", 1 << 10)  # how many passes is asked here, and a CPU would take them slowly
    device = Device(monkeypatch, late)
    clock = TransportClock(bp.Mesh.single().transport("cpu"), CPU, streams=True)
    began = []
    assert clock.time(lambda: began.append(clock._held[0].item()), 2) == pytest.approx(3.5e-3)
    tries = min(late, 4) + 1
    held = [sum(100 * 2**i for i in range(min(one, 3) + 1)) for one in range(tries)]
    assert began == [passes for passes in held for _ in range(2)], "what it was given before each try"
    assert clock._passes == passes
    assert clock.time(lambda: None, 1) == pytest.approx(7e-3)
    assert clock._held[0] == held[-1] + passes, "as long the next time"
    assert device.late <= 0 or late == 99


# ------------------------------------------------------------------------------------------------ real ranks


def test_the_slowest_rank_counts_on_all():
    def work(mesh):
        clock = TransportClock(mesh.transport("cpu"), CPU, streams=False)
        return clock.time(lambda: time.sleep(0.05 * mesh.rank), 2)

    times = bp.run_local(3, work)
    assert len(set(times)) == 1
    assert 0.1 <= times[0] < 1.0


def test_messages_of_a_lap_come():
    def work(mesh):
        transport = mesh.transport("cpu")
        peers = Peers.others(mesh.rank, mesh.size)
        before = transport.fabric.sent[mesh.rank]
        lap(transport, torch.full((1000,), mesh.rank, dtype=torch.uint8), peers, 4)()
        return transport.fabric.sent[mesh.rank] - before

    assert bp.run_local(3, work) == [4 * 2 * 1000] * 3


SMALL = Shape(4, 2, 16, length=64)


@pytest.mark.parametrize(("ranks", "inner"), [(1, None), (2, None), (3, None), (4, 2)])
def test_all_of_it_over_threads(tmp_path, ranks, inner):
    def work(mesh):
        said: list[str] = []
        return measure(mesh, CPU, SMALL, "auto", said.append), said

    (facts, said), *others = bp.run_local(ranks, work, inner=inner)
    assert all(other == (facts, said) for other in others)
    path = tmp_path / "rates.json"
    path.write_text(json.dumps(facts))
    found = read_rates(path)
    assert (found.ranks, found.kernel) == (ranks, "cpu_flash")
    assert as_json(found.rates) == facts["rates"] | {
        name: tuple(map(tuple, facts["rates"][name])) for name in ("link", "direct", "spread")
    } | {"holds_up": tuple(facts["rates"]["holds_up"]), "far": tuple(facts["rates"]["far"])}
    assert set(facts["how"]) == set(facts["rates"])
    measured = {name for name, how in facts["how"].items() if how["measured"]}
    alone = {"tflops", "launch_latency", "backward", "backward_launch_latency", "memory"}
    of_links = {"gbps", "hop_latency", "link", "direct", "spread", "holds_up"}
    if "too soon to tell" in facts["how"]["holds_up"]["how"]:  # kernels as small as these may be shorter than a message
        measured.add("holds_up")
    assert measured == alone | (of_links if ranks > 1 else set()) | ({"node", "outer_gbps"} if inner else set())
    assert [size for size, _ in found.rates.link] == ([1 << 16, 1 << 20, 8 << 20] if ranks > 1 else [])
    assert len(found.rates.spread) == (3 if ranks == 3 else 0)  # two ranks, or two a node: the other is the next
    assert found.rates.node == (inner or 0)
    assert all(0 <= share <= 1 for share in found.rates.holds_up)
    guess = rates_of(load("cpu"), ranks)
    if ranks == 1:
        assert "one rank has no links; kept as it was: the guess of the backend cpu" in facts["how"]["link"]["how"]
        assert (found.rates.gbps, found.rates.hop_latency) == (guess.gbps, guess.hop_latency)
    assert found.rates.tflops != guess.tflops
    steady = {"tflops", "backward", "memory"} | ({"link"} if ranks > 1 else set())
    steady |= {"spread"} if found.rates.spread else set()
    assert set(facts["varied"]) == steady | ({"outer_gbps"} if inner else set())
    for name, most in facts["varied"].items():
        assert most >= 1
        assert facts["how"][name]["how"].endswith("times the shortest")
    q = torch.ones(1, 8, 4, 16)
    if ranks > 1:
        why = bp.run_local(
            ranks,
            lambda mesh: (
                bp.explain(
                    q, q, q, mesh=bp.Mesh(mesh.rank, ranks, mesh.transport, config=Config(rates=str(path)))
                ).strategy.why
            ),
        )
        assert len(set(why)) == 1
        assert f"at rates measured on {facts['device']} ({path}, {facts['date']})" in why[0]


def test_a_device_without_the_memory(monkeypatch):
    def full(*_: object, **__: object) -> Block:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB.")

    monkeypatch.setattr(rates, "Block", full)
    with pytest.raises(DeviceError, match="does not fit the device's memory; got CUDA out of memory; take fewer"):
        measure(bp.Mesh.single(), CPU, SMALL, "auto")


def test_the_kernel_that_is_named():
    facts = measure(bp.Mesh.single(), CPU, SMALL, "reference")
    assert (facts["kernel"], facts["rates"]["in_pieces"]) == ("reference", False)
