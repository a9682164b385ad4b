"""A GPU's sensors through NVML."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module

from burst_portable.errors import BackendUnavailableError


class NvmlMeter:
    """See `backends.base.Meter`. `uuid` is torch's, of the device: NVML counts devices in an order of its own."""

    def __init__(self, uuid: str) -> None:
        try:
            self._nvml = nvml = import_module("pynvml")
        except ModuleNotFoundError as error:
            raise BackendUnavailableError("NVML is not installed: pip install nvidia-ml-py") from error
        try:
            nvml.nvmlInit()
            device = nvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
        except nvml.NVMLError as error:
            raise BackendUnavailableError(f"NVML is not available: {error}") from error
        self._sensors: dict[str, Callable[[], float]] = {
            "watts": lambda: nvml.nvmlDeviceGetPowerUsage(device) / 1000,
            "megahertz": lambda: nvml.nvmlDeviceGetClockInfo(device, nvml.NVML_CLOCK_SM),
            "celsius": lambda: nvml.nvmlDeviceGetTemperature(device, nvml.NVML_TEMPERATURE_GPU),
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
