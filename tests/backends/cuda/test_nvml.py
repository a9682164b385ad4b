"""Test what the cuda backend reports of a machine: another or old build of torch, an unsuitable driver, NVML."""

from __future__ import annotations

import pytest
import torch

from burst_portable.backends import selection
from burst_portable.backends.cuda import nvml


@pytest.fixture
def cuda_build(monkeypatch):
    """Simulate torch built for CUDA on a host without a visible GPU."""
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def test_cuda_probe_asks_for_cuda_build_of_torch():
    if torch.backends.cuda.is_built():
        pytest.skip("this torch is built for CUDA")
    found = selection.load("cuda").probe()
    assert not found.ok
    assert found.reason == "this torch is built without CUDA; install a CUDA build of torch"


def test_cuda_probe_rejects_old_torch(cuda_build, installed):
    installed("torch", "2.6.0+cu124")
    found = selection.load("cuda").probe()
    assert not found.ok
    assert "the package torch is too old; got 2.6.0+cu124; allowed: 2.11 or later" in found.reason


DRIVERS = {
    "absent": "Found no NVIDIA driver on your system.",
    "too old": "The NVIDIA driver on your system is too old (found version 11040).",
    "broken": "Unexpected error from cudaGetDeviceCount().\n  Error 802: system not yet initialized",
}


@pytest.mark.parametrize("said", DRIVERS.values(), ids=list(DRIVERS))
def test_cuda_probe_quotes_driver_error(cuda_build, monkeypatch, said):
    def init():
        raise RuntimeError(said)

    monkeypatch.setattr(torch.cuda, "init", init)
    reason = selection.load("cuda").probe().reason
    told = f"no NVIDIA GPU is visible; got RuntimeError: {' '.join(said.split())}; look at nvidia-smi"
    assert told in reason


def test_cuda_probe_reports_no_visible_device(cuda_build, monkeypatch):
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    assert "shows no device; look at nvidia-smi and CUDA_VISIBLE_DEVICES" in selection.load("cuda").probe().reason


NVML = {
    "too old": ("11.5", "", "the package nvidia-ml-py is too old; got 11.5; allowed: 12.560 or later"),
    "broken": (
        "13.590",
        "1 / 0\n",
        "the package nvidia-ml-py 13.590 is broken: it fails to import; got ZeroDivisionError",
    ),
}


@pytest.mark.parametrize(("version", "source", "what"), NVML.values(), ids=list(NVML))
def test_nvml_facts_name_fault_of_package(installed, version, source, what):
    installed("nvidia-ml-py", version, source, module="pynvml")
    assert what in nvml._nvml_facts()["nvml"]


def test_nvml_facts_report_missing_package(monkeypatch):
    if nvml.package_error("nvidia-ml-py", "0") == "":
        pytest.skip("it is installed here")
    assert "the package nvidia-ml-py is not installed" in nvml._nvml_facts()["nvml"]
