"""What is there: devices, versions, links."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch


def device_facts() -> dict[str, Any]:
    """Devices and libraries as torch sees them; driver and links where NVML can be asked."""
    devices = []
    for index in range(torch.cuda.device_count()):
        facts = torch.cuda.get_device_properties(index)
        devices.append(
            {
                "name": facts.name,
                "capability": f"sm_{facts.major}{facts.minor}",
                "memory_gib": round(facts.total_memory / 2**30, 1),
                "multiprocessors": facts.multi_processor_count,
            }
        )
    return {
        "devices": devices,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if torch.distributed.is_nccl_available() else "absent",
        **_nvml_facts(),
    }


def _nvml_facts() -> dict[str, Any]:
    """Driver and NVLink from NVML; the reason where it cannot be asked. Absent is a reason, broken is too."""
    try:
        nvml = import_module("pynvml")
    except ModuleNotFoundError:
        return {"nvml": "not installed: pip install nvidia-ml-py"}
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        return {"nvml": f"not available: {error}"}
    try:
        handles = [nvml.nvmlDeviceGetHandleByIndex(i) for i in range(nvml.nvmlDeviceGetCount())]
        return {
            "driver": nvml.nvmlSystemGetDriverVersion(),
            "nvlinks": [_active_links(nvml, handle) for handle in handles],
        }
    finally:
        nvml.nvmlShutdown()


def _active_links(nvml: Any, handle: Any) -> int:
    """NVLinks that are up on one device; 0 where it has none."""
    active = 0
    for link in range(nvml.NVML_NVLINK_MAX_LINKS):
        try:
            active += nvml.nvmlDeviceGetNvLinkState(handle, link)
        except nvml.NVMLError:
            break  # the first link that the device does not have
    return active
