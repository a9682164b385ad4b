"""Read facts, sensors and link counters of NVIDIA GPUs from NVML."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch

from burst_portable.backends.base import SensorMeter, package_error
from burst_portable.backends.cuda.peers.connection import unavailable
from burst_portable.errors import BackendUnavailableError


def open_device(uuid: str) -> tuple[Any, Any]:
    """Return NVML's module and its handle of a device. The caller must call `nvmlShutdown` once per handle.

    The device is found by torch's UUID, because NVML and torch number devices differently.

    Raises:
        BackendUnavailableError: NVML is absent, cannot start, or does not find the device.
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
        raise BackendUnavailableError(f"NVML does not find GPU-{uuid}: {error}") from error


def active_links(nvml: Any, device: Any) -> list[int]:
    """Return the numbers of the NVLinks of a device that are up."""
    active = []
    for link in range(nvml.NVML_NVLINK_MAX_LINKS):
        try:
            if nvml.nvmlDeviceGetNvLinkState(device, link):
                active.append(link)
        except nvml.NVMLError:
            break  # the first link that the device does not have
    return active


def libraries() -> dict[str, Any]:
    """Return the versions of libraries that torch uses, and the driver and links if NVML works."""
    return {
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "peer_copy": unavailable() or "used for plans whose messages go directly to the rank that uses them",
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if torch.distributed.is_nccl_available() else "absent",
        **_nvml_facts(),
    }


def _nvml_facts() -> dict[str, Any]:
    """Return the driver and the NVLinks from NVML, or the reason why it is unavailable."""
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


class NvmlMeter(SensorMeter):
    """See `backends.base.Meter`. The device is found by torch's UUID."""

    def __init__(self, uuid: str) -> None:
        nvml, device = open_device(uuid)
        sensors = {
            "watts": lambda: nvml.nvmlDeviceGetPowerUsage(device) / 1000,
            "megahertz": lambda: nvml.nvmlDeviceGetClockInfo(device, nvml.NVML_CLOCK_SM),
            "celsius": lambda: nvml.nvmlDeviceGetTemperature(device, nvml.NVML_TEMPERATURE_GPU),
            "joules": lambda: nvml.nvmlDeviceGetTotalEnergyConsumption(device) / 1000,
        }
        super().__init__(sensors, (nvml.NVMLError,), nvml.nvmlShutdown)


_KIB = 1024


class NvlinkCounters:
    """See `backends.base.LinkCounters`. Each link counts whole KiB since the driver was loaded.

    Raises:
        BackendUnavailableError: no NVLink of the GPU is up, or its counters cannot be read.
    """

    def __init__(self, uuid: str) -> None:
        self._nvml, self._device = open_device(uuid)
        self._links = active_links(self._nvml, self._device)
        try:
            if not self._links:
                raise BackendUnavailableError(
                    "no NVLink of this GPU is up", next_step="run `nvidia-smi nvlink --status`"
                )
            self.read()
        except BackendUnavailableError:
            self.close()
            raise

    def read(self) -> tuple[int, int]:
        nvml, links = self._nvml, self._links
        directions = nvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX, nvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX
        fields = [(direction, link) for direction in directions for link in links]  # without a link, NVML reads link 0
        try:
            values = nvml.nvmlDeviceGetFieldValues(self._device, fields)
        except nvml.NVMLError as error:
            raise BackendUnavailableError(f"NVML does not report the bytes of this GPU's NVLinks: {error}") from error
        for (_, link), value in zip(fields, values, strict=True):
            if value.nvmlReturn != nvml.NVML_SUCCESS:
                reason = nvml.nvmlErrorString(value.nvmlReturn)
                raise BackendUnavailableError(f"NVML does not report the bytes of this GPU's NVLink {link}: {reason}")
        counted = [_KIB * int(value.value.ullVal) for value in values]
        return sum(counted[: len(links)]), sum(counted[len(links) :])

    def close(self) -> None:
        self._nvml.nvmlShutdown()
