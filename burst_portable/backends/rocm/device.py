"""Read the facts, sensors and peak rates of AMD GPUs."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch

from burst_portable.backends.base import Peaks, SensorMeter, package_error, sheet_peaks
from burst_portable.errors import BackendUnavailableError, in_a_line


def architecture(properties: Any) -> str:
    """Return the architecture of a device without its features: gfx942:sramecc+:xnack- -> gfx942."""
    return str(properties.gcnArchName).partition(":")[0]


NO_PEER_COPIES = "no: HIP documents stream waits only on its signal memory, not on memory that a peer writes"
"""ROCm 7.0, hipStreamWaitValue32. Waiting by a kernel instead would occupy a compute unit."""


def libraries() -> dict[str, Any]:
    """Return the versions of libraries that torch uses, and the driver and links if amdsmi works."""
    return {
        "hip": torch.version.hip,
        "miopen": torch.backends.cudnn.version(),
        "rccl": ".".join(map(str, torch.cuda.nccl.version())) if torch.distributed.is_nccl_available() else "absent",
        "flash": str(torch.backends.cuda.preferred_rocm_fa_library()).rpartition(".")[2],
        "peer_copy": NO_PEER_COPIES,
        **amdsmi_facts(),
    }


def amdsmi_facts() -> dict[str, Any]:
    """Return the driver and the xGMI links from amdsmi, or the reason why it is unavailable.

    Bindings without ROCm's libamd_smi.so raise KeyError, OSError or AttributeError on import.
    """
    install = "pip install the amdsmi of the installed ROCm: /opt/rocm/share/amd_smi has it"
    if reason := package_error("amdsmi", "6.3", module="amdsmi", install=install):
        return {"amdsmi": reason}
    smi = import_module("amdsmi")
    try:
        smi.amdsmi_init()
    except smi.AmdSmiException as error:
        return {"amdsmi": f"not available: {' '.join(str(error).split())}"}
    try:
        devices, xgmi = smi.amdsmi_get_processor_handles(), smi.AmdSmiLinkType.AMDSMI_LINK_TYPE_XGMI
        return {
            "driver": smi.amdsmi_get_gpu_driver_info(devices[0])["driver_version"],
            "xgmi_peers": [  # connected by xGMI, not PCIe
                sum(smi.amdsmi_topo_get_link_type(one, other)["type"] == xgmi for other in devices if other is not one)
                for one in devices
            ],
        }
    except (smi.AmdSmiException, IndexError) as error:  # a virtual machine may hide the topology
        return {"amdsmi": f"reports no devices: {' '.join(str(error).split())}"}
    finally:
        smi.amdsmi_shut_down()


class AmdsmiMeter(SensorMeter):
    """See `backends.base.Meter`. `address` is the PCI address of the device, for example "0000:c1:00.0"."""

    def __init__(self, address: str) -> None:
        if find_spec("amdsmi") is None:
            raise BackendUnavailableError(
                "amdsmi is not installed: pip install amdsmi, of the installed ROCm's version"
            )
        try:
            smi = import_module("amdsmi")
        # Bindings without libamd_smi.so raise KeyError, OSError or AttributeError.
        except Exception as error:
            raise BackendUnavailableError(f"amdsmi is broken: {in_a_line(error)}") from error
        try:
            smi.amdsmi_init()
            device = smi.amdsmi_get_processor_handle_from_bdf(address)
        except smi.AmdSmiException as error:
            raise BackendUnavailableError(f"amdsmi is not available: {' '.join(str(error).split())}") from error
        hottest = smi.AmdSmiTemperatureType.HOTSPOT, smi.AmdSmiTemperatureMetric.CURRENT
        sensors: dict[str, Callable[[], float]] = {
            "watts": lambda: _watts(smi.amdsmi_get_power_info(device)),
            "megahertz": lambda: smi.amdsmi_get_clock_info(device, smi.AmdSmiClkType.GFX)["clk"],
            "celsius": lambda: smi.amdsmi_get_temp_metric(device, *hottest),
            "joules": lambda: _joules(smi.amdsmi_get_energy_count(device)),
        }
        # The device lacks a sensor ("N/A"), or the release names it differently.
        absent = smi.AmdSmiException, KeyError, TypeError, ValueError
        super().__init__(sensors, absent, smi.amdsmi_shut_down)


def _watts(power: dict[str, Any]) -> float:
    """Return the current power, as MI300 reports it, or the average, as older chips do. The other one is "N/A"."""
    current = power.get("current_socket_power")
    return float(current if isinstance(current, int | float) else power["average_socket_power"])


def _joules(count: dict[str, Any]) -> float:
    """Return joules from a counter whose resolution is in microjoules. Its name depends on the release."""
    counted = count["energy_accumulator"] if "energy_accumulator" in count else count["power"]
    return float(counted * count["counter_resolution"]) / 1e6


# (chip, compute units, part of the name): (TFLOP/s, GB/s, source). Compared in November 2026 with public copies of
# these sheets, and with units x clock x FLOPs per clock and unit: 1024 for MI200, 2048 for MI300, 4096 for MI355X. The
# copies differ on MI350X, which is therefore left out.
_MI200 = "AMD Instinct MI200 series data sheet"
_BY_DEVICE = {
    ("gfx90a", 110, "MI250X"): (191.5, 1638.4, _MI200),
    ("gfx90a", 104, "MI250"): (181.05, 1638.4, _MI200),
    ("gfx90a", 104, "MI210"): (181.0, 1638.4, _MI200),
    ("gfx942", 304, "MI300X"): (1307.4, 5300.0, "AMD Instinct MI300X data sheet"),
    ("gfx942", 304, "MI325X"): (1307.4, 6000.0, "AMD Instinct MI325X data sheet"),
    ("gfx950", 256, "MI355X"): (2516.6, 8000.0, "AMD Instinct MI355X data sheet"),
}


def peaks(name: str, chip: str, units: int, dtype: str) -> Peaks:
    """Return the peaks of a device by its name, chip and compute units; unknown if the table lacks it."""
    sheets = (sheet for (*known, part), sheet in _BY_DEVICE.items() if known == [chip, units] and part in name)
    return sheet_peaks(name, dtype, next(sheets, None))
