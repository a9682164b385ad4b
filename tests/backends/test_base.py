"""Test the base class of backends: required methods and default values."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

import burst_portable as bp
from burst_portable.backends.base import AcceleratorBackend, Backend, Capabilities, HardwareSpec, Probe
from burst_portable.backends.selection import choose_kernel
from burst_portable.comm.base import Transport
from burst_portable.errors import BackendUnavailableError, UnsupportedError
from burst_portable.kernels.base import Kernel
from burst_portable.kernels.reference import ReferenceKernel
from tests.support.calls import kernel_call

GUIDE = Path(__file__).resolve().parents[2] / "docs" / "writing_a_backend.md"


class Least(Backend):
    name = "least"
    capabilities = Capabilities("cpu", "gloo", False, HardwareSpec(tflops=1.0, intra_node_bandwidth=1.0))

    def probe(self):
        return Probe(True)

    def kernels(self):
        return (ReferenceKernel(),)


@pytest.mark.parametrize("cls", [Backend, AcceleratorBackend, Kernel, Transport])
def test_guide_lists_required_methods_of_class(cls):
    home = f"`{cls.__module__.removeprefix('burst_portable.')}.{cls.__name__}`: "
    items = re.findall(r"^- (.*(?:\n  .*)*)", GUIDE.read_text(encoding="utf-8"), re.MULTILINE)
    (item,) = (item.removeprefix(home) for item in items if item.startswith(home))
    must_define, has_default = item.split("Defaults:")
    assert set(re.findall(r"`(\w+)`", must_define)) == cls.__abstractmethods__
    listed = set(re.findall(r"`(\w+)`", has_default))
    assert all(name in dir(cls) for name in listed)
    if cls is Backend:
        public = {name for name in dir(Backend) if not name.startswith("_")}
        assert listed == public - Backend.__abstractmethods__


@pytest.mark.parametrize(
    ("kernels", "says"),
    [
        (lambda: 1 / 0, "kernels() failed; got ZeroDivisionError"),
        (lambda: ReferenceKernel(), "kernels() failed; got TypeError"),
        (lambda: (object(),), "returned an object that is no kernel; got <object"),
    ],
    ids=["raises", "no tuple", "no kernel"],
)
def test_choose_kernel_names_broken_backend(kernels, says):
    backend = Least()
    backend.kernels = kernels
    with pytest.raises(BackendUnavailableError, match=re.escape(says)):
        choose_kernel(backend, kernel_call(torch.float32, "cpu", 2, 2, 8, 8))


def test_kernel_without_name_raises_type_error():
    class Nameless(ReferenceKernel):
        name = Kernel.name

    with pytest.raises(TypeError, match="name"):
        Nameless()


def test_backend_defaults_report_missing_features():
    backend = Least()
    assert (
        backend.measured_hardware(2, "")
        is backend.group_options(None)
        is backend.tracer()
        is backend.kineto([])
        is None
    )
    assert backend.peaks("float32").flops is None
    with pytest.raises(BackendUnavailableError, match="the backend 'least' reads no sensors"):
        backend.meter(0)
    with pytest.raises(BackendUnavailableError, match="'least' does not count what crosses links"):
        backend.link_counters(0)
    with pytest.raises(UnsupportedError, match="'least' has no direct transport"):
        backend.connect_direct(None, None, 1.0)


def test_backend_without_transport_serves_one_rank_only(monkeypatch):
    backend, x = Least(), torch.randn(1, 8, 2, 16)
    monkeypatch.setattr(bp.Mesh, "backend_for", lambda mesh, device_type: backend)
    assert bp.attention(x, x, x, mesh=bp.Mesh.single()).shape == x.shape
    with pytest.raises(UnsupportedError, match="the backend 'least' has no transport, so it supports one rank only"):
        backend.transport(None, 1.0)
