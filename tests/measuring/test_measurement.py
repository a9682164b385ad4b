"""Test the results of `measure`, on simulated clocks and on ranks that are threads."""

from __future__ import annotations

import json

import pytest
import torch

import burst_portable as bp
from burst_portable.backends.selection import hardware_of, load
from burst_portable.config import Config
from burst_portable.errors import DeviceError
from burst_portable.measuring import measurement
from burst_portable.measuring.measurement import measure, measure_slowdown, measured_call
from burst_portable.measuring.timing import Block, Peers
from burst_portable.planning.hardware import HardwareSpec, as_json, read_hardware_spec
from tests.support.simulated_clock import CPU, Machine, Simulated


@pytest.mark.parametrize("share", [0.0, 0.3, 0.9, 1.0])
@pytest.mark.parametrize(("kernel", "message"), [(1.0, 0.1), (0.1, 1.0), (1.0, 0.001), (1.0, 0.9)])
def test_measure_slowdown_finds_slowdown_of_machine(share, kernel, message):
    machine = Machine(kernel=kernel, message=message, share=share)
    calls, peers = (machine.compute, machine.compute), Peers([1], [1])
    found, text = measure_slowdown(Simulated(machine), machine, *calls, torch.ones(8), peers)
    assert found == pytest.approx(share)
    assert text.startswith("kernels ")


def test_measure_keeps_slowdown_that_cannot_be_measured(monkeypatch):
    """No number of kernels outlasts the messages; the file states where the value is from."""
    monkeypatch.setattr(measurement, "measure_slowdown", lambda *_: (None, "planted"))

    def work(mesh):
        return measure(mesh, CPU, SMALL, "auto")

    facts = bp.run_threads(2, work)[0]
    assert facts["hardware"]["comm_slowdown"] == hardware_of(load("cpu"), 2).comm_slowdown
    how = facts["methods"]["comm_slowdown"]
    assert not how["measured"]
    assert how["method"].startswith("forward: planted; backward: planted")
    assert "unchanged: the guess of the backend cpu" in how["method"]


@pytest.mark.parametrize("known", [(0.0, 0.0), (0.9, 0.3)])
def test_high_priority_slowdown_fills_unknown_comm_slowdown(known, monkeypatch):
    """A value that the backend already has is kept."""
    monkeypatch.setattr(measurement, "measure_slowdown", lambda *_: (0.25, "planted"))
    before = HardwareSpec(tflops=1.0, intra_node_bandwidth=1.0, comm_slowdown=known)
    monkeypatch.setattr(type(load("cpu")), "measured_hardware", lambda *_: before, raising=False)

    def work(mesh):
        mesh.transport("cpu").high_priority = True
        return measure(mesh, CPU, SMALL, "auto")

    facts = bp.run_threads(2, work)[0]
    assert facts["hardware"]["comm_slowdown_high_priority"] == (0.25, 0.25)
    assert facts["methods"]["comm_slowdown_high_priority"]["measured"]
    assert facts["hardware"]["comm_slowdown"] == (known if any(known) else (0.25, 0.25))
    assert not facts["methods"]["comm_slowdown"]["measured"]
    assert ("taken from comm_slowdown_high_priority" in facts["methods"]["comm_slowdown"]["method"]) is not any(known)


def test_varied_returns_largest_ratio_since_last_call():
    """Returns the ratio of the call that varies most, and each time only for calls since the last one."""
    clock = Simulated(Machine())
    times = iter([1.0, 4.0, 3.0, 4.0, 2.0, 5.0])  # three rounds of two calls
    clock.time = lambda call, calls: next(times)
    assert clock.medians([lambda: None] * 2, 1) == [2.0, 4.0]
    assert clock.pop_max_over_min() == 3.0
    assert clock.pop_max_over_min() == 1.0
    clock.time = lambda call, calls: 0.0  # a clock that is too coarse gives no ratio
    assert clock.median(lambda: None) == 0.0
    assert clock.pop_max_over_min() == 1.0


SMALL = measured_call(4, 2, 16, "float32", "cpu", 64)


# The tests above measure with two ranks.
@pytest.mark.parametrize(
    ("ranks", "ranks_per_node"),
    [(1, None), pytest.param(2, None, marks=pytest.mark.full), (3, None), (4, 2)],
)
def test_measure_over_threads_writes_readable_file(tmp_path, ranks, ranks_per_node):
    def work(mesh):
        said: list[str] = []
        return measure(mesh, CPU, SMALL, "auto", said.append), said

    (facts, said), *others = bp.run_threads(ranks, work, ranks_per_node=ranks_per_node)
    assert all(other == (facts, said) for other in others)
    path = tmp_path / "hardware.json"
    path.write_text(json.dumps(facts))
    found = read_hardware_spec(path)
    assert (found.ranks, found.kernel) == (ranks, "cpu_flash")
    pairs = {name: tuple(facts["hardware"][name]) for name in ("comm_slowdown", "long_kv_efficiency")}
    curves = {
        name: tuple(map(tuple, facts["hardware"][name]))
        for name in ("p2p_bandwidth", "peer_copy_bandwidth", "all_to_all_bandwidth")
    }
    assert as_json(found.hardware) == facts["hardware"] | pairs | curves
    assert set(facts["methods"]) == set(facts["hardware"])
    measured = {name for name, how in facts["methods"].items() if how["measured"]}
    alone = {"tflops", "launch_latency", "backward_tflops", "backward_launch_latency", "memory_bandwidth"}
    of_links = {
        "intra_node_bandwidth",
        "message_latency",
        "p2p_bandwidth",
        "peer_copy_bandwidth",
        "all_to_all_bandwidth",
        "comm_slowdown",
    }
    if (
        "too early to measure a slowdown" in facts["methods"]["comm_slowdown"]["method"]
    ):  # such small kernels may be shorter than a message
        measured.add("comm_slowdown")
    assert measured == alone | (of_links if ranks > 1 else set()) | (
        {"ranks_per_node", "inter_node_bandwidth"} if ranks_per_node else set()
    )
    assert [size for size, _ in found.hardware.p2p_bandwidth] == ([1 << 16, 1 << 20, 8 << 20] if ranks > 1 else [])
    assert len(found.hardware.all_to_all_bandwidth) == (
        3 if ranks == 3 else 0
    )  # with two ranks in total or per node, the other rank is the next one
    assert found.hardware.ranks_per_node == (ranks_per_node or 0)
    assert all(0 <= share <= 1 for share in found.hardware.comm_slowdown)
    guess = hardware_of(load("cpu"), ranks)
    if ranks == 1:
        kept = "one rank has no links; unchanged: the guess of the backend cpu"
        assert kept in facts["methods"]["p2p_bandwidth"]["method"]
        assert (found.hardware.intra_node_bandwidth, found.hardware.message_latency) == (
            guess.intra_node_bandwidth,
            guess.message_latency,
        )
    assert found.hardware.tflops != guess.tflops
    steady = {"tflops", "backward_tflops", "memory_bandwidth"} | ({"p2p_bandwidth"} if ranks > 1 else set())
    steady |= {"all_to_all_bandwidth"} if found.hardware.all_to_all_bandwidth else set()
    rounds = {name: method for name, method in facts["methods"].items() if method["max_over_min"] is not None}
    assert set(rounds) == steady | ({"inter_node_bandwidth"} if ranks_per_node else set())
    for method in rounds.values():
        assert method["max_over_min"] >= 1
        assert method["method"].endswith("times the shortest")
    q = torch.ones(1, 8, 4, 16)
    if ranks > 1:
        why = bp.run_threads(
            ranks,
            lambda mesh: (
                bp.explain(
                    q, q, q, mesh=bp.Mesh(mesh.rank, ranks, mesh.transport, config=Config(hardware_spec=str(path)))
                ).strategy.why
            ),
        )
        assert len(set(why)) == 1
        assert f"at rates measured on {facts['device']} ({path}, {facts['date']})" in why[0]


def test_measure_names_device_memory_if_blocks_do_not_fit(monkeypatch):
    def full(*_: object, **__: object) -> Block:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB.")

    monkeypatch.setattr(measurement, "Block", full)
    with pytest.raises(DeviceError, match="does not fit the device's memory; got CUDA out of memory; take fewer"):
        measure(bp.Mesh.single(), CPU, SMALL, "auto")


def test_measure_uses_named_kernel():
    facts = measure(bp.Mesh.single(), CPU, SMALL, "reference")
    assert (facts["kernel"], facts["hardware"]["kernel"]["splits_tiles"]) == ("reference", False)
