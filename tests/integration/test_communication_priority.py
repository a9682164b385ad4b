"""Test transports whose messages have priority over kernels: which kernels yield, and the predicted time."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

import burst_portable as bp
from burst_portable.backends.cpu.backend import CpuBackend
from burst_portable.backends.cuda.backend import CudaBackend, has_high_priority
from burst_portable.backends.cuda.machines import hardware_of_machine
from burst_portable.backends.selection import group_options_of, load
from burst_portable.cli.run.job import hardware_of_run
from burst_portable.cli.run.worker import join
from burst_portable.errors import BackendUnavailableError
from burst_portable.kernels.base import WrappedKernel
from burst_portable.planning.hardware import HardwareSpec
from burst_portable.profiling.plan_facts import PlanFacts
from burst_portable.runtime.mesh_plans import strategy_and_call
from burst_portable.strategies.auto import AutoStrategy
from tests.runtime.test_explanation import qkv
from tests.support.seams import calls_with

GROUPS = bp.make_strategy("ulysses", head_groups=2)


class Asked(WrappedKernel):
    """Record in each step whether the rank's forward kernel must yield."""

    def __init__(self, wrapped, seen):
        super().__init__(wrapped)
        self._seen = seen

    def attend(self, *args, yields_to_comm=False, **options):
        self._seen.append(yields_to_comm)
        return super().attend(*args, yields_to_comm=yields_to_comm, **options)

    def forward_single_call(self, *args, yields_to_comm=False):
        self._seen.append(yields_to_comm)
        return super().forward_single_call(*args, yields_to_comm=yields_to_comm)


@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize(
    ("strategy", "steps"),
    [
        ("ring", [True, True, True, False]),
        (bp.make_strategy("ring", transfer="direct"), [True, True, True, False]),
        ("double_ring", [True, True, True, False]),
        (GROUPS, [True, True]),
        ("ulysses", [False]),
        ("usp", [True, False]),
    ],
    ids=str,
)
def test_kernels_yield_during_transfers(strategy, steps, first):
    """The last step of a ring has no transfer."""
    seen = {rank: [] for rank in range(4)}

    def work(mesh):
        mesh.transport("cpu").high_priority = first
        with calls_with(kernel=lambda kernel: Asked(kernel, seen[mesh.rank])):
            bp.attention(*qkv(heads=8, kv_heads=8), mesh=mesh, strategy=strategy, layout="striped")

    bp.run_threads(4, work, ranks_per_node=2)
    assert seen == {rank: [first and step for step in steps] for rank in range(4)}


def test_kernels_yield_during_sends_only():
    """Causal and contiguous: rank 0 only sends, rank 1 forwards, rank 2 only receives."""
    seen = {rank: [] for rank in range(3)}

    def work(mesh):
        mesh.transport("cpu").high_priority = True
        with calls_with(kernel=lambda kernel: Asked(kernel, seen[mesh.rank])):
            bp.attention(*qkv(), mesh=mesh, strategy="ring", layout="contiguous")

    bp.run_threads(3, work)
    assert seen == {0: [True], 1: [True, True], 2: [True, True, False]}


def test_single_rank_does_not_yield():
    def work(mesh):
        mesh.transport("cpu").high_priority = True
        bp.attention(*qkv(), mesh=mesh)
        (call,) = mesh._calls.values()
        return call.yields_to_comm

    assert bp.run_threads(1, work) == [False]


def test_where_messages_go_first_replaces_slowdown():
    hardware = HardwareSpec(
        tflops=1.0, intra_node_bandwidth=1.0, comm_slowdown=(0.9, 0.3), comm_slowdown_high_priority=(0.1, 0.2)
    )
    assert hardware.with_high_priority() == replace(hardware, comm_slowdown=(0.1, 0.2))
    known = replace(hardware, comm_slowdown_high_priority=None)
    assert known.with_high_priority() == known
    hopper, other = (hardware_of_machine("NVIDIA H200", 2, kernel) for kernel in ("hopper", "reference"))
    assert hopper.comm_slowdown_high_priority[0] < hopper.comm_slowdown[0]
    assert other.comm_slowdown_high_priority is None  # without a measurement, the kernel is assumed to wait


@pytest.mark.parametrize("first", [False, True])
def test_auto_uses_slowdown_of_its_transport(first, monkeypatch):
    measured = HardwareSpec(
        tflops=1.0, intra_node_bandwidth=1.0, comm_slowdown=(0.9, 0.3), comm_slowdown_high_priority=(0.1, 0.2)
    )
    monkeypatch.setattr(CpuBackend, "measured_hardware", lambda *_: measured)

    def work(mesh):
        mesh.transport("cpu").high_priority = first
        sizes = {"heads": 8, "kv_heads": 8, "head_dim": 16, "dtype": torch.float32}
        strategy, _ = strategy_and_call(mesh, "auto", "cpu", **sizes)
        return strategy.hardware.comm_slowdown

    assert bp.run_threads(2, work) == [(0.1, 0.2) if first else (0.9, 0.3)] * 2


@pytest.mark.parametrize("first", [False, True])
def test_auto_uses_head_groups_if_messages_have_priority(first):
    """All groups but the first and the last overlap with the kernel if no message waits for it."""
    hardware = hardware_of_machine("NVIDIA H200", 2, "hopper")
    hardware = replace(hardware, peer_copy_bandwidth=())  # without peer copies, over NCCL
    strategy = AutoStrategy(hardware=hardware.with_high_priority() if first else hardware)
    plan = bp.plan(seq_len=32768, ranks=2, heads=32, mask="causal", strategy=strategy)
    assert ("ulysses(head_groups=2)" in plan.reason) is first
    assert (plan.head_groups > 1) is first


@pytest.mark.parametrize("options", [None, "some"])
def test_run_uses_slowdown_of_its_process_group(options, monkeypatch):
    measured = HardwareSpec(
        tflops=1.0, intra_node_bandwidth=1.0, comm_slowdown=(0.9, 0.3), comm_slowdown_high_priority=(0.1, 0.2)
    )
    monkeypatch.setattr(CpuBackend, "measured_hardware", lambda *_: measured)
    monkeypatch.setattr(CpuBackend, "group_options", lambda *_: options)
    found = hardware_of_run(load("cpu"), 2, "", "float32", 16)
    assert found.comm_slowdown == ((0.1, 0.2) if options else (0.9, 0.3))


def test_hardware_of_unknown_kernel_is_that_of_first_kernel():
    """`run` cannot choose the kernel before tensors exist."""
    unknown, hopper = (hardware_of_machine("NVIDIA H200", 2, kernel) for kernel in ("", "hopper"))
    assert unknown.with_high_priority().comm_slowdown == hopper.comm_slowdown_high_priority


def test_profile_predicts_with_slowdown_of_its_transport(monkeypatch):
    slow = HardwareSpec(
        tflops=1e-3, intra_node_bandwidth=1e-3, comm_slowdown=(0.9, 0.9), comm_slowdown_high_priority=(0.0, 0.0)
    )
    monkeypatch.setattr(CpuBackend, "measured_hardware", lambda *_: slow)
    facts = PlanFacts(bp.plan(seq_len=4096, ranks=2, heads=2, head_dim=16, strategy="ring"), 0)
    first, last = (
        facts.describe(load("cpu"), high_priority=first)["planned"]["forward"]["seconds"] for first in (True, False)
    )
    assert first < last


def test_group_options_come_from_backend(monkeypatch):
    five = timedelta(seconds=5)
    assert group_options_of(load("cpu"), five) == {"timeout": five}
    monkeypatch.setattr(CpuBackend, "group_options", lambda self, timeout: ("mine", timeout))
    asked = load("cpu")
    assert group_options_of(asked, five) == {"timeout": five, "pg_options": ("mine", five)}


@pytest.mark.parametrize("wrong", [RuntimeError("no such switch"), TypeError("got 2 arguments"), None])
def test_invalid_group_options_name_backend(wrong, tmp_path, monkeypatch):
    """A RuntimeError of torch would otherwise be read as ranks that did not join."""

    def raises(backend, timeout):
        raise wrong

    monkeypatch.setattr(CpuBackend, "group_options", raises if wrong else 3)
    with pytest.raises(BackendUnavailableError, match=f"'cpu' is broken.*{wrong or 'not callable'}"):
        join("cpu", 0, 2, tmp_path)


@pytest.mark.parametrize("first", [False, True])
def test_has_high_priority_reads_nccl_options(first):
    options = SimpleNamespace(is_high_priority_stream=first)
    group = SimpleNamespace(
        _get_backend=lambda device: SimpleNamespace(options=options) if device.type == "cuda" else None
    )
    assert has_high_priority(group) is first


def test_has_high_priority_is_false_for_other_groups():
    def nothing(device):
        raise RuntimeError(f"No backend type associated with device type {device.type}")

    for get in (lambda device: SimpleNamespace(), nothing):
        assert has_high_priority(SimpleNamespace(_get_backend=get)) is False


@pytest.mark.skipif(dist.is_available() and dist.is_nccl_available(), reason="for a torch without NCCL")
def test_high_priority_options_without_nccl_is_none():
    assert CudaBackend().group_options(timedelta(seconds=5)) is None


@pytest.mark.parametrize("given", ["options", None])
def test_explain_recommends_high_priority_group(given, monkeypatch):
    """If the group is not of high priority, the backend can make one, and messages overlap kernels."""
    monkeypatch.setattr(CpuBackend, "group_options", lambda self, timeout: given)

    def work(mesh):
        def told(strategy="ring"):
            return "high priority" in str(bp.explain(*qkv(), mesh=mesh, strategy=strategy))

        threads = told()
        mesh.group = object()
        found = [threads, told(), told("ulysses")]
        mesh.transport("cpu").high_priority = True
        return [*found, told()]

    assert bp.run_threads(2, work) == [[False, given is not None, False, False]] * 2
