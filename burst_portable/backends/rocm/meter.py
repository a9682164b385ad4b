"""A GPU's sensors through amdsmi. Written from its documentation; not run on a device."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from burst_portable.errors import BackendUnavailableError, in_a_line


class AmdsmiMeter:
    """See `backends.base.Meter`. `address` is the device's on the PCI bus: "0000:c1:00.0"."""

    def __init__(self, address: str) -> None:
        if find_spec("amdsmi") is None:
            raise BackendUnavailableError(
                "amdsmi is not installed: pip install amdsmi, of the installed ROCm's version"
            )
        try:
            self._smi = smi = import_module("amdsmi")
        # The bindings are there and libamd_smi.so is not: they raise KeyError, OSError, AttributeError.
        except Exception as error:
            raise BackendUnavailableError(f"amdsmi is broken: {in_a_line(error)}") from error
        try:
            smi.amdsmi_init()
            device = smi.amdsmi_get_processor_handle_from_bdf(address)
        except smi.AmdSmiException as error:
            raise BackendUnavailableError(f"amdsmi is not available: {' '.join(str(error).split())}") from error
        hottest = smi.AmdSmiTemperatureType.HOTSPOT, smi.AmdSmiTemperatureMetric.CURRENT
        self._sensors: dict[str, Callable[[], float]] = {
            "watts": lambda: _watts(smi.amdsmi_get_power_info(device)),
            "megahertz": lambda: smi.amdsmi_get_clock_info(device, smi.AmdSmiClkType.GFX)["clk"],
            "celsius": lambda: smi.amdsmi_get_temp_metric(device, *hottest),
            "joules": lambda: _joules(smi.amdsmi_get_energy_count(device)),
        }

    def read(self) -> dict[str, float]:
        found = {}
        for name, sensor in self._sensors.items():
            try:
                found[name] = float(sensor())
            except (self._smi.AmdSmiException, KeyError, TypeError, ValueError):
                continue  # no such sensor here ("N/A"), or another name in this release
        return found

    def close(self) -> None:
        self._smi.amdsmi_shut_down()


def _watts(power: dict[str, Any]) -> float:
    """MI300 tell the current power, older chips the average; the other one is "N/A"."""
    current = power.get("current_socket_power")
    return float(current if isinstance(current, int | float) else power["average_socket_power"])


def _joules(count: dict[str, Any]) -> float:
    """Joules from a counter whose unit is in microjoules; releases use two names for it."""
    counted = count["energy_accumulator"] if "energy_accumulator" in count else count["power"]
    return float(counted * count["counter_resolution"]) / 1e6
