"""Test a step without communication, without compute, and without both: each removes only its own part."""

from __future__ import annotations

import copy
import itertools
import time

import pytest
import torch
from torch import nn

import burst_portable as bp
from burst_portable.backends.cpu.attention import CpuFlashKernel
from burst_portable.comm.base import Exchange, Transport
from burst_portable.comm.local import LocalTransport
from burst_portable.comm.peer_copy import PeerCopyTransport
from burst_portable.profiling.ablation import STEPS, ablate
from burst_portable.runtime import head_parallel
from burst_portable.runtime.reshard import Reshard
from tests.support.thread_peers import World, run_peers

pytestmark = pytest.mark.alone

SLOW_KERNEL, SLOW_LINK = 0.15, 0.1  # seconds; a busy machine loses some milliseconds at any time
SHORT = 0.01  # a tenth of the shorter delay


class Late:
    """A message that arrives some time after it was posted."""

    def __init__(self, handle) -> None:
        self._handle, self._from = handle, time.perf_counter() + SLOW_LINK

    def wait(self) -> None:
        self._handle.wait()
        time.sleep(max(0.0, self._from - time.perf_counter()))


def slow_down(monkeypatch, *places: str) -> None:
    post = LocalTransport.post

    def slow(attend):
        def slow_attend(self, *arguments, **options):
            time.sleep(SLOW_KERNEL)
            return attend(self, *arguments, **options)

        return slow_attend

    def slow_post(self, sends, receives, label=""):
        leaving, arriving = post(self, sends, receives, label)
        late = label.startswith(("forward", "to heads"))
        return leaving, [Late(h) for h in arriving] if late else arriving

    if "kernel" in places:
        for method in ("attend", "forward_single_call"):
            monkeypatch.setattr(CpuFlashKernel, method, slow(getattr(CpuFlashKernel, method)))
    if "link" in places:
        monkeypatch.setattr(LocalTransport, "post", slow_post)


def ablated(strategy: str):
    """Return the ablation of a forward pass on two ranks. Assert that communication and compute work again."""

    def work(mesh):
        q, k, v = (torch.ones(1, 16, 4, 8) for _ in range(3))

        def step():
            return bp.attention(q, k, v, mesh=mesh, strategy=strategy, mask="full")

        found = ablate(step, mesh=mesh)
        assert torch.isfinite(step()).all()
        return found

    return bp.run_threads(2, work)


@pytest.mark.parametrize(("strategy", "kernels"), [("ring", 2), ("ulysses", 1)])
@pytest.mark.parametrize("slow", ["kernel", "link"])
def test_ablate_finds_planted_delay_within_10_percent(slow, strategy, kernels, monkeypatch):
    slow_down(monkeypatch, slow)
    for found in ablated(strategy):
        if slow == "kernel":
            assert found.exposed_computing == pytest.approx(kernels * SLOW_KERNEL, rel=0.1)
            assert found.exposed_communication < SHORT
        else:
            assert found.exposed_communication == pytest.approx(SLOW_LINK, rel=0.1)
            assert found.exposed_computing < SHORT
        assert found.without_both < SHORT


def test_ablate_reports_hidden_transfer(monkeypatch):
    """The block arrives while the rank computes with its own."""
    slow_down(monkeypatch, "kernel", "link")
    for found in ablated("ring"):
        assert found.hidden == pytest.approx(SLOW_LINK, abs=SHORT)
        assert found.exposed_communication < SHORT
        facts = found.facts()
        parts = ("without_both", "exposed_communication", "exposed_computing", "hidden")
        assert facts["full_step_ns"] == sum(facts[f"{name}_ns"] for name in parts)


def test_ablate_accepts_lengths_that_change():
    """Without communication, each rank has its own values in place of those of other ranks, also for a new length."""

    def work(mesh):
        generator = torch.Generator().manual_seed(mesh.rank)
        lengths = itertools.count(8)

        def step():
            x = torch.randn(1, next(lengths), 2, 8, generator=generator)
            return bp.attention(x, x, x, mesh=mesh)

        ablate(step, mesh=mesh, repeat=1)
        assert next(lengths) == 13
        return True

    assert bp.run_threads(2, work) == [True, True]


@pytest.mark.parametrize("picks", [True, False])
def test_ablation_without_communication_skips_unused_packing(picks, monkeypatch):
    """Otherwise the communication part would lack the packing time."""
    monkeypatch.setattr(PeerCopyTransport, "supports_strided_sends", picks)
    packed, owned = [], []

    class Noting(Reshard):
        def _packed(self, *arguments):
            packed.append(1)
            return super()._packed(*arguments)

    monkeypatch.setattr(head_parallel, "Reshard", Noting)
    copy_local = Exchange.copy_local

    def noting(exchange: Exchange) -> None:
        owned.append(len(exchange._local))
        copy_local(exchange)

    monkeypatch.setattr(Exchange, "copy_local", noting)

    def work(mesh):
        x = torch.ones(1, 16, 4, 8, requires_grad=True)
        ablate(lambda: bp.attention(x, x, x, mesh=mesh, strategy="ulysses").sum().backward(), mesh=mesh, repeat=1)

    run_peers(World(2), work)
    assert set(owned) == ({0} if picks else {1, 3}), "tensors that a rank copies to itself"
    # Packed in forward only if necessary. The gradient is one expanded number and is always packed. Two ranks, five
    # steps.
    assert len(packed) == 2 * 5 * (1 if picks else 2)


class Model(nn.Module):
    """Attention between a module with random numbers and one with running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(8, 3 * 8), nn.Linear(8, 8)
        self.norm, self.drop = nn.BatchNorm1d(8), nn.Dropout(0.3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.into(self.drop(x)).view(1, -1, 3, 1, 8).unbind(2)
        return self.out(self.norm(bp.attention(q, k, v).flatten(0, 2))).square().mean()


@pytest.mark.parametrize("watched", ["closed", "open"])
def test_ablate_leaves_training_state_unchanged(watched):
    torch.manual_seed(0)
    first = Model()
    other = copy.deepcopy(first)
    x, seen = torch.randn(12, 8), []

    def trained(model: Model, between) -> tuple:
        torch.manual_seed(1)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        losses = []
        for _ in range(3):
            optimizer.zero_grad()
            losses.append(model(x))
            losses[-1].backward()
            gradients = [p.grad.clone() for p in model.parameters()]
            between(model)
            assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), gradients, strict=True))
            optimizer.step()
        moments = [m for s in optimizer.state.values() for m in s.values()]
        return [*losses, *model.parameters(), *model.buffers(), *moments, torch.get_rng_state()]

    def extra(model: Model) -> None:
        def step() -> None:
            seen.append(model(x))
            seen[-1].backward()

        session = bp.profile()
        if watched == "open":
            with session:
                session.ablate(step, model=model)
        else:
            session.ablate(step, model=model)
        assert all(len(table) == 0 for one in session.records() for table in one.tables.values())

    plain, ablations = trained(first, lambda model: None), trained(other, extra)
    assert len(seen) == 3 * STEPS
    assert len({loss.item() for loss in seen if loss.isfinite()}) > 1, "these steps draw numbers of their own"
    assert all(torch.equal(a, b) for a, b in zip(plain, ablations, strict=True))


def test_ablate_restores_state_after_error():
    model, x = Model(), torch.randn(12, 8)
    model(x).backward()
    before = [model.into.weight.grad.clone(), model.norm.running_mean.clone(), torch.get_rng_state()]

    def step() -> None:
        model(x).backward()
        raise OSError("it broke")

    with pytest.raises(OSError, match="it broke"):
        ablate(step, model=model)
    after = [model.into.weight.grad, model.norm.running_mean, torch.get_rng_state()]
    assert all(torch.equal(a, b) for a, b in zip(after, before, strict=True))


def test_ablate_rejects_zero_repeats():
    with pytest.raises(bp.BurstError, match="repeat must be a positive integer"):
        ablate(lambda: None, repeat=0)


@pytest.fixture
def devices(monkeypatch) -> set[str]:
    """Record the devices on which ranks connect, which are those of the steps."""
    transport, found = bp.Mesh.transport, set()

    def counted(mesh: bp.Mesh, device: str) -> Transport:
        found.add(device)
        return transport(mesh, device)

    monkeypatch.setattr(bp.Mesh, "transport", counted)
    return found


def test_ablate_uses_device_of_model_or_records(devices, monkeypatch):
    """Host time does not measure a step of a device with streams, and random states differ."""
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: torch.device("cuda"))
    with pytest.raises(bp.BurstError, match="the device of the step is unknown"):
        ablate(lambda: None)
    ablate(lambda: None, model=Model())
    with bp.profile() as session:
        bp.attention(*(torch.randn(1, 8, 1, 8) for _ in range(3)))
    session.ablate(lambda: None)
    assert devices == {"cpu"}


def test_ablate_uses_cpu_without_available_accelerator(devices, monkeypatch):
    def current(check_available: bool = False) -> torch.device | None:
        return None if check_available else torch.device("cuda")

    monkeypatch.setattr(torch.accelerator, "current_accelerator", current)
    ablate(lambda: None)
    assert devices == {"cpu"}
