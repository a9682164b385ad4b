"""Test that `explain` describes what `attention` does for the same arguments."""

from __future__ import annotations

import pytest
import torch

import burst_portable as bp
from burst_portable.backends.cpu.backend import CpuBackend
from burst_portable.comm.local import Fabric, LocalTransport
from burst_portable.config import Config
from burst_portable.errors import InputError, UnknownNameError, UnsupportedError
from burst_portable.planning.hardware import HardwareSpec


def local_transport(device_type):
    return LocalTransport(Fabric(2, 1.0), 0)


def qkv(rows=16, heads=4, kv_heads=2):
    return [torch.randn(1, rows, h, 8) for h in (heads, kv_heads, kv_heads)]


@pytest.mark.parametrize("strategy", ["auto", "ring", "burst", "ulysses", bp.make_strategy("ring", transfer="direct")])
@pytest.mark.parametrize("options", [{}, {"softcap": 2.0, "layout": "striped"}, {"kernel": "reference"}])
def test_explain_describes_what_runs(strategy, options):
    def work(mesh):
        told = bp.explain(*qkv(), mesh=mesh, strategy=strategy, **options)
        assert not mesh._calls
        bp.attention(*qkv(), mesh=mesh, strategy=strategy, **options)
        (call,) = mesh._calls.values()
        assert told.strategy.name == call.plan.label
        assert told.kernel.name == call.kernel.name
        assert (told.transport.name, told.transport.why) == (call.transport.name, "the only one")
        assert told.layout.startswith(f"{call.plan.call.layout.name}: rank {mesh.rank} of 2 holds 16 of 32")
        assert told.strategy.why.startswith("chose" if strategy == "auto" else "named")
        if not call.plan.heads:
            assert f"({call.plan.forward.route.name})" in told.traffic["forward"]
        return told

    bp.run_threads(2, work)


def test_explain_works_on_one_rank_with_shapes_only():
    def work(mesh):
        if mesh.rank == 1:
            tensors = [x.to("meta") for x in qkv(rows=1 << 20)]
            return bp.explain(*tensors, mesh=mesh, device="cpu", kernel="reference", strategy="burst")
        return None

    _, told = bp.run_threads(2, work)
    assert (told.backend.name, told.kernel.name, told.kernel.why) == ("cpu", "reference", "named")
    assert told.traffic["backward"] == "Q, dO, LSE and delta are sent, then dQ (ring)"


def test_explain_gives_every_reason():
    told = bp.explain(*qkv(), softcap=2.0, mask="documents:0,5,12", mesh=bp.Mesh.single(backend="cpu"))
    assert (told.backend.name, told.backend.why) == ("cpu", "named by the mesh")
    assert told.backend.not_chosen["cuda"] == "it takes tensors on cuda"
    assert told.kernel.not_chosen == {"cpu_flash": "it has no softcap"}
    assert told.traffic == {
        "forward": "nothing, one rank holds all tokens",
        "backward": "nothing, one rank holds all tokens",
    }
    assert told.strategy.why == "one rank: no communication, so nothing to choose"
    assert told.mask == "documents(2): 43 pairs per head; 4 fully masked tokens"
    text = str(told).splitlines()
    assert "kernel    reference: the first of the backend's that serves it" in text
    assert "          not cpu_flash: it has no softcap" in text
    assert "transport local: one rank" in text
    assert "not ulysses" in bp.explain(*qkv(heads=3, kv_heads=3), mesh=bp.Mesh(0, 2, local_transport)).strategy.why
    by_setting = bp.explain(*qkv(), mesh=bp.Mesh.single(config=Config(kernel="reference")))
    assert (by_setting.kernel.name, by_setting.kernel.why) == ("reference", "named by the settings (BURST_KERNEL)")


def test_explain_predicts_time_for_chosen_kernel():
    """The hardware spec depends on the kernel name and on whether it splits tiles."""
    asked = []

    class Measured(CpuBackend):
        def measured_hardware(self, ranks, kernel):
            asked.append((ranks, kernel))
            return HardwareSpec(1.0, 1e-3, memory_bandwidth=1e-6)  # only merging takes time

    backend = Measured()
    mesh = bp.Mesh(0, 2, local_transport)
    mesh.backend_for = lambda device_type: backend
    told = {name: bp.explain(*qkv(), mesh=mesh, kernel=name).strategy.why for name in ("cpu_flash", "reference")}
    assert asked == [(2, "cpu_flash"), (2, "reference")]
    assert told["cpu_flash"] != told["reference"]


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"kernel": "cpu_flash", "softcap": 2.0}, UnsupportedError, "no softcap; allowed: reference"),
        ({"kernel": "cpu_flsh"}, UnknownNameError, "did you mean 'cpu_flash'"),
        ({"mask": "window:x"}, InputError, "cannot be read"),
        ({"sinks": torch.zeros(3)}, InputError, "one logit per query head"),
        ({"device": "meta"}, UnsupportedError, "no backend for tensors on 'meta': not cpu: it takes tensors on cpu"),
        ({"device": "fast"}, InputError, "not a device; got 'fast'"),
        ({"device": 1.5}, InputError, "not a device"),
    ],
)
def test_explain_rejects_what_attention_rejects(options, error, message):
    with pytest.raises(error, match=message):
        bp.explain(*qkv(), **options)


def test_explain_of_meta_tensors_needs_device():
    with pytest.raises(InputError, match=r'name no backend; .* explain\(q, k, v, device="cuda", \.\.\.\)'):
        bp.explain(*(x.to("meta") for x in qkv()))
