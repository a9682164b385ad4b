"""NVML, NVIDIA's library of facts about its GPUs: opened, and what more than one of this folder asks it."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch

from burst_portable.backends.base import package_error
from burst_portable.backends.cuda.peers.connection import unavailable
from burst_portable.errors import BackendUnavailableError


def opened(uuid: str) -> tuple[Any, Any]:
    """The module, and its handle of a device. Who is done with it calls `nvmlShutdown`: NVML counts.

    `uuid` is torch's, of the device: NVML counts devices in an order of its own. Raises `BackendUnavailableError`.
    """
    try:
        nvml = import_module("pynvml")
    except ModuleNotFoundError as error:
        raise BackendUnavailableError("NVML is not installed: pip install nvidia-ml-py") from error
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        raise BackendUnavailableError(f"NVML is not available: {error}") from error
    try:
        return nvml, nvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
    except nvml.NVMLError as error:
        nvml.nvmlShutdown()
        raise BackendUnavailableError(f"NVML does not know GPU-{uuid}: {error}") from error


def active_links(nvml: Any, device: Any) -> list[int]:
    """The NVLinks of a device that are up; none where it has none."""
    active = []
    for link in range(nvml.NVML_NVLINK_MAX_LINKS):
        try:
            if nvml.nvmlDeviceGetNvLinkState(device, link):
                active.append(link)
        except nvml.NVMLError:
            break  # the first link that the device does not have
    return active


def libraries() -> dict[str, Any]:
    """Libraries as torch sees them; driver and links where NVML can be asked."""
    return {
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "peer_copy": unavailable() or "taken where messages go straight to where they are used",
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if torch.distributed.is_nccl_available() else "absent",
        **_nvml_facts(),
    }


def _nvml_facts() -> dict[str, Any]:
    """Driver and NVLink from NVML; the reason where it cannot be asked: absent, too old or broken."""
    if reason := package_error("nvidia-ml-py", "12.560", module="pynvml"):
        return {"nvml": reason}
    nvml = import_module("pynvml")
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        return {"nvml": f"not available: {error}"}
    try:
        handles = [nvml.nvmlDeviceGetHandleByIndex(i) for i in range(nvml.nvmlDeviceGetCount())]
        return {
            "driver": nvml.nvmlSystemGetDriverVersion(),
            "nvlinks": [len(active_links(nvml, handle)) for handle in handles],
        }
    finally:
        nvml.nvmlShutdown()


class NvmlMeter:
    """See `backends.base.Meter`. `uuid` is torch's, of the device."""

    def __init__(self, uuid: str) -> None:
        nvml, device = opened(uuid)
        self._nvml = nvml
        self._sensors: dict[str, Callable[[], float]] = {
            "watts": lambda: nvml.nvmlDeviceGetPowerUsage(device) / 1000,
            "megahertz": lambda: nvml.nvmlDeviceGetClockInfo(device, nvml.NVML_CLOCK_SM),
            "celsius": lambda: nvml.nvmlDeviceGetTemperature(device, nvml.NVML_TEMPERATURE_GPU),
            "joules": lambda: nvml.nvmlDeviceGetTotalEnergyConsumption(device) / 1000,
        }

    def read(self) -> dict[str, float]:
        found = {}
        for name, sensor in self._sensors.items():
            try:
                found[name] = float(sensor())
            except self._nvml.NVMLError:
                continue  # this device has no such sensor
        return found

    def close(self) -> None:
        self._nvml.nvmlShutdown()


_KIB = 1024


class NvlinkCounters:
    """See `backends.base.LinkCounters`. Each link counts whole KiB, since the driver was loaded.

    Raises `BackendUnavailableError` where the GPU has no link that is up, or its counters cannot be read.
    """

    def __init__(self, uuid: str) -> None:
        self._nvml, self._device = opened(uuid)
        self._links = active_links(self._nvml, self._device)
        try:
            if not self._links:
                raise BackendUnavailableError(
                    "this GPU has no NVLink that is up", next_step="`nvidia-smi nvlink --status` tells of them"
                )
            self.read()
        except BackendUnavailableError:
            self.close()
            raise

    def read(self) -> tuple[int, int]:
        nvml, links = self._nvml, self._links
        ways = nvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX, nvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX
        asked = [(way, link) for way in ways for link in links]  # a field without its link would be that of link 0
        try:
            values = nvml.nvmlDeviceGetFieldValues(self._device, asked)
        except nvml.NVMLError as error:
            raise BackendUnavailableError(f"NVML tells no bytes of this GPU's NVLinks: {error}") from error
        for (_, link), value in zip(asked, values, strict=True):
            if value.nvmlReturn != nvml.NVML_SUCCESS:
                why = nvml.nvmlErrorString(value.nvmlReturn)
                raise BackendUnavailableError(f"NVML tells no bytes of this GPU's NVLink {link}: {why}")
        counted = [_KIB * int(value.value.ullVal) for value in values]
        return sum(counted[: len(links)]), sum(counted[len(links) :])

    def close(self) -> None:
        self._nvml.nvmlShutdown()
