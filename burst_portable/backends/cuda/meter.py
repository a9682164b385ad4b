"""A GPU's sensors through NVML."""

from __future__ import annotations

from collections.abc import Callable

from burst_portable.backends.cuda.nvml import opened


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
