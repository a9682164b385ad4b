"""The rocm backend beside the cuda one: which build of torch is whose, what is told where something is missing."""

from __future__ import annotations

import subprocess
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from burst_portable.backends import registry
from burst_portable.backends.rocm import probe
from burst_portable.errors import UnsupportedError


@pytest.fixture
def hip_build(monkeypatch):
    """As on a host with two GPUs and torch for ROCm."""
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
    monkeypatch.setattr(torch.backends.cuda, "preferred_rocm_fa_library", lambda: "_ROCmFABackend.Default")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: chip)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 27, 7), raising=False)
    registry.for_device.cache_clear()
    yield
    registry.for_device.cache_clear()


def test_torch_without_rocm_is_told_what_to_install():
    found = registry.load("rocm").probe()
    assert not found.ok
    assert f"this torch ({torch.__version__}) is not built for ROCm" in found.reason
    assert "PyTorch's own package index" in found.reason


def test_each_refuses_the_build_of_the_other(hip_build):
    refused = registry.load("cuda").probe()
    assert not refused.ok
    assert "built for ROCm; use the backend 'rocm'" in refused.reason
    assert registry.for_device("cuda").name == "rocm"


def test_no_gpu_is_told_where_to_look(hip_build, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "HIP_VISIBLE_DEVICES" in registry.load("rocm").probe().reason
    with pytest.raises(UnsupportedError, match=r"built for ROCm.*no AMD GPU is visible"):
        registry.for_device("cuda")


def test_facts(hip_build):
    found = registry.load("rocm").probe()
    assert found.ok
    assert [one["architecture"] for one in found.facts["devices"]] == ["gfx942", "gfx942"]
    assert found.facts["devices"][0]["memory_gib"] == 192.0
    assert found.facts["hip"].startswith("7.2")
    assert found.facts["flash"] == "Default"


def test_capabilities_are_those_of_torch_for_rocm():
    backend = registry.load("rocm")
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
def smi(monkeypatch):
    module = Smi("amdsmi")
    monkeypatch.setitem(sys.modules, "amdsmi", module)
    monkeypatch.setattr(probe, "find_spec", lambda name: module)
    return module


def test_amdsmi_is_asked_and_closed(smi):
    assert probe.amdsmi_facts() == {"driver": "6.16.6", "xgmi_peers": [1, 1, 0]}
    assert smi.open == 0


def test_amdsmi_that_cannot_be_asked_is_a_reason(smi, monkeypatch):
    def no_driver(*arguments):
        raise smi.AmdSmiException("no driver\nis loaded")

    with monkeypatch.context() as patched:
        patched.setattr(smi, "amdsmi_topo_get_link_type", no_driver)
        assert probe.amdsmi_facts() == {"amdsmi": "tells nothing: no driver is loaded"}
        assert smi.open == 0
    with monkeypatch.context() as patched:
        patched.setattr(smi, "amdsmi_init", no_driver)
        assert probe.amdsmi_facts() == {"amdsmi": "not available: no driver is loaded"}


def test_amdsmi_absent_and_broken_are_two_reasons(tmp_path, monkeypatch):
    monkeypatch.delitem(sys.modules, "amdsmi", raising=False)
    monkeypatch.setattr(probe, "find_spec", lambda name: None)
    assert "not installed: pip install amdsmi" in probe.amdsmi_facts()["amdsmi"]
    (tmp_path / "amdsmi.py").write_text("raise KeyError('libamd_smi.so')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(probe, "find_spec", lambda name: True)
    assert probe.amdsmi_facts()["amdsmi"] == ("broken: KeyError: 'libamd_smi.so'; is libamd_smi.so of ROCm installed?")


def test_looking_imports_nothing_of_the_vendor():
    code = (
        "import sys\nfrom burst_portable.backends.registry import load\nload('rocm').probe()\n"
        "sys.exit(', '.join({'triton', 'aiter', 'amdsmi', 'pynvml'}.intersection(sys.modules)) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
