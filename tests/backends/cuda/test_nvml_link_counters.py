"""Test the counters of a GPU's NVLinks with a simulated NVML."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from burst_portable.backends import selection
from burst_portable.backends.cuda.nvml import NvlinkCounters
from burst_portable.errors import BackendUnavailableError

TX, RX = 138, 139
NOT_SUPPORTED = 3


class Nvml(ModuleType):
    """Simulate one device.

    Links 0 and 2 are up, link 1 is down, and link 3 does not exist. Counters are KiB per direction and link.
    """

    NVMLError = type("NVMLError", (Exception,), {})
    NVML_NVLINK_MAX_LINKS = 18
    NVML_SUCCESS = 0
    NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX, NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX = TX, RX

    def __init__(self):
        super().__init__("pynvml")
        self.up = [1, 0, 1]
        self.kib = {(TX, 0): 5, (TX, 2): 1 << 40, (RX, 0): 7, (RX, 2): 11}
        self.refused = None
        self.open = 0

    def nvmlInit(self):
        self.open += 1

    def nvmlShutdown(self):
        self.open -= 1

    def nvmlDeviceGetHandleByUUID(self, uuid):
        if uuid != "GPU-1234":
            raise self.NVMLError("Not Found")
        return "device"

    def nvmlDeviceGetNvLinkState(self, device, link):
        if link >= len(self.up):
            raise self.NVMLError("Invalid Argument")
        return self.up[link]

    def nvmlDeviceGetFieldValues(self, device, asked):
        """Return the counters. As in NVML, an entry without a scope has scope 0, which is link 0."""
        if self.refused == "all":
            raise self.NVMLError("GPU is lost")
        pairs = [(one, 0) if isinstance(one, int) else one for one in asked]
        return [
            SimpleNamespace(nvmlReturn=NOT_SUPPORTED, value=None)
            if pair == self.refused
            else SimpleNamespace(nvmlReturn=0, value=SimpleNamespace(ullVal=self.kib[pair]))
            for pair in pairs
        ]

    def nvmlErrorString(self, code):
        return {NOT_SUPPORTED: "Not Supported"}[code]


@pytest.fixture
def nvml(monkeypatch):
    made = Nvml()
    monkeypatch.setitem(sys.modules, "pynvml", made)
    return made


def test_link_counters_sum_active_links(nvml):
    counters = NvlinkCounters("1234")
    assert counters.read() == (((1 << 40) + 5) * 1024, 18 * 1024)
    nvml.kib[TX, 2] += 3
    assert counters.read() == (((1 << 40) + 8) * 1024, 18 * 1024)
    counters.close()
    assert nvml.open == 0


@pytest.mark.parametrize(
    ("refused", "told"),
    [
        ((RX, 2), "NVML does not report the bytes of this GPU's NVLink 2: Not Supported"),
        ("all", "NVML does not report the bytes of this GPU's NVLinks: GPU is lost"),
    ],
)
def test_unreadable_link_counters_raise(nvml, refused, told):
    """This holds on creation and on each read, because a sum must include all links."""
    counters = NvlinkCounters("1234")
    nvml.refused = refused
    with pytest.raises(BackendUnavailableError, match=told):
        counters.read()
    with pytest.raises(BackendUnavailableError, match=told):
        NvlinkCounters("1234")
    counters.close()
    assert nvml.open == 0


@pytest.mark.parametrize("up", [[], [0, 0]])
def test_link_counters_need_an_active_link(nvml, up):
    nvml.up = up
    with pytest.raises(BackendUnavailableError, match="no NVLink of this GPU is up"):
        NvlinkCounters("1234")
    assert nvml.open == 0


def test_link_counters_reject_unknown_gpu(nvml):
    with pytest.raises(BackendUnavailableError, match="NVML does not find GPU-none: Not Found"):
        NvlinkCounters("none")
    assert nvml.open == 0


def test_cuda_backend_offers_link_counters(nvml, monkeypatch):
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda index: SimpleNamespace(uuid=["none", "1234"][index])
    )
    cuda = selection.load("cuda")
    found = selection.open_or_reason(cuda.link_counters, 1)
    assert found.read()[1] == 18 * 1024
    found.close()
    nvml.up = []
    assert "no NVLink of this GPU is up" in selection.open_or_reason(cuda.link_counters, 1)


def test_cpu_backend_counts_no_links():
    told = selection.open_or_reason(selection.load("cpu").link_counters, 0)
    assert told == "the backend 'cpu' does not count what crosses links between devices"
