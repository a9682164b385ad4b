"""Test that the rocm and cuda backends recognize their builds of torch, and the reasons for missing features."""

from __future__ import annotations

import subprocess
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from burst_portable.backends import selection
from burst_portable.backends.rocm import device as probe
from burst_portable.backends.rocm.backend import RocmBackend
from burst_portable.errors import UnsupportedError
from burst_portable.kernels import base
from tests.support.calls import kernel_call

DEFAULT_LIBRARY = "_ROCmFABackend.Default"  # torch's name


@pytest.fixture
def hip_build(monkeypatch):
    """Simulate a host with two GPUs and torch for ROCm."""
    chip = SimpleNamespace(
        name="AMD Instinct MI300X",
        total_memory=192 << 30,
        multi_processor_count=304,
        gcnArchName="gfx942:sramecc+:xnack-",
        major=9,
        minor=4,
    )
    monkeypatch.setattr(torch.version, "hip", "7.2.26015-fc0010cf6a")
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    monkeypatch.setattr(torch.backends.cuda, "preferred_rocm_fa_library", lambda: DEFAULT_LIBRARY)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: chip)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 27, 7), raising=False)
    selection.for_device.cache_clear()
    yield
    selection.for_device.cache_clear()


def test_rocm_probe_asks_for_rocm_build_of_torch():
    found = selection.load("rocm").probe()
    assert not found.ok
    assert f"this torch ({torch.__version__}) is not built for ROCm" in found.reason
    assert "PyTorch's own package index" in found.reason


def test_cuda_probe_rejects_rocm_build(hip_build):
    refused = selection.load("cuda").probe()
    assert not refused.ok
    assert "built for ROCm; use the backend 'rocm'" in refused.reason
    assert selection.for_device("cuda").name == "rocm"


def test_rocm_probe_reports_no_visible_device(hip_build, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "HIP_VISIBLE_DEVICES" in selection.load("rocm").probe().reason
    with pytest.raises(UnsupportedError, match=r"built for ROCm.*no AMD GPU is visible"):
        selection.for_device("cuda")


def test_rocm_probe_facts(hip_build):
    found = selection.load("rocm").probe()
    assert found.ok
    assert [one["architecture"] for one in found.facts["devices"]] == ["gfx942", "gfx942"]
    assert found.facts["devices"][0]["memory_gib"] == 192.0
    assert found.facts["hip"].startswith("7.2")
    assert found.facts["flash"] == "Default"


def test_rocm_capabilities_and_kernels():
    backend = selection.load("rocm")
    assert (backend.capabilities.device_type, backend.capabilities.process_group) == ("cuda", "nccl")
    assert backend.capabilities.streams
    assert [kernel.name for kernel in backend.kernels()] == ["triton", "aiter", "flash", "reference"]


class Smi(ModuleType):
    """amdsmi on a host with three devices, of which two are linked."""

    class AmdSmiException(Exception):
        pass

    AmdSmiLinkType = SimpleNamespace(AMDSMI_LINK_TYPE_XGMI=2)
    open = 0

    def amdsmi_init(self):
        self.open += 1

    def amdsmi_shut_down(self):
        self.open -= 1

    def amdsmi_get_processor_handles(self):
        return ["a", "b", "c"]

    def amdsmi_get_gpu_driver_info(self, device):
        return {"driver_version": "6.16.6"}

    def amdsmi_topo_get_link_type(self, one, other):
        return {"hops": 1, "type": 2 if {one, other} == {"a", "b"} else 1}


@pytest.fixture
def smi(monkeypatch, installed):
    module = Smi("amdsmi")
    installed("amdsmi", "7.0.2")
    monkeypatch.setitem(sys.modules, "amdsmi", module)
    return module


def test_amdsmi_facts_are_read_and_amdsmi_is_closed(smi):
    assert probe.amdsmi_facts() == {"driver": "6.16.6", "xgmi_peers": [1, 1, 0]}
    assert smi.open == 0


def test_amdsmi_facts_report_driver_error(smi, monkeypatch):
    def no_driver(*arguments):
        raise smi.AmdSmiException("no driver\nis loaded")

    with monkeypatch.context() as patched:
        patched.setattr(smi, "amdsmi_topo_get_link_type", no_driver)
        assert probe.amdsmi_facts() == {"amdsmi": "reports no devices: no driver is loaded"}
        assert smi.open == 0
    with monkeypatch.context() as patched:
        patched.setattr(smi, "amdsmi_init", no_driver)
        assert probe.amdsmi_facts() == {"amdsmi": "not available: no driver is loaded"}


AMDSMI = {
    "absent": (None, "the package amdsmi is not installed", "/opt/rocm/share/amd_smi has it"),
    "too old": ("5.7.1", "the package amdsmi is too old; got 5.7.1; allowed: 6.3 or later", "/opt/rocm/share/amd_smi"),
    "broken": (
        "7.0.2",
        "the package amdsmi 7.0.2 is broken: it fails to import; got KeyError: 'libamd_smi.so'",
        "with the driver that it is made for",
    ),
}


@pytest.mark.parametrize(("version", "what", "then"), AMDSMI.values(), ids=list(AMDSMI))
def test_amdsmi_facts_name_fault_of_package(installed, version, what, then):
    if version is not None:
        installed("amdsmi", version, "raise KeyError('libamd_smi.so')\n")
    reason = probe.amdsmi_facts()["amdsmi"]
    assert what in reason
    assert then in reason


def test_rocm_probe_rejects_old_torch(hip_build, installed):
    installed("torch", "2.6.0+rocm6.2.4")
    found = selection.load("rocm").probe()
    assert not found.ok
    assert "the package torch is too old; got 2.6.0+rocm6.2.4; allowed: 2.11 or later" in found.reason


def test_rocm_probe_quotes_driver_error(hip_build, monkeypatch):
    def init():
        raise RuntimeError("No HIP GPUs are available")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "init", init)
    reason = selection.load("rocm").probe().reason
    assert "no AMD GPU is visible; got RuntimeError: No HIP GPUs are available; look at rocminfo" in reason


TRITON = {
    "absent": (None, "the package triton is not installed", "comes with PyTorch's ROCm wheels"),
    "stale": ("2.1.0", "the package triton is too old; got 2.1.0; allowed: 3.6 or later", "PyTorch's ROCm wheels"),
}


@pytest.mark.parametrize(("version", "what", "then"), TRITON.values(), ids=list(TRITON))
def test_rocm_triton_kernel_declines_unsuitable_triton(monkeypatch, version, what, then):
    found = ModuleType("triton")
    found.__version__ = version
    monkeypatch.setattr(base, "find_spec", lambda name: None if version is None else found)
    monkeypatch.setitem(sys.modules, "triton", found)
    (kernel,) = (k for k in RocmBackend().kernels() if k.name == "triton")
    support = kernel.supports(kernel_call(torch.bfloat16, "cuda", 4, 2, 64, 64))
    assert not support.ok
    assert what in support.reason
    assert then in support.reason


def test_rocm_probe_imports_no_vendor_package():
    code = (
        "import sys\nfrom burst_portable.backends.selection import load\nload('rocm').probe()\n"
        "sys.exit(', '.join({'triton', 'aiter', 'amdsmi', 'pynvml'}.intersection(sys.modules)) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
