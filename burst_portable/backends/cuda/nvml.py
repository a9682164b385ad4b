"""NVML, NVIDIA's library of facts about its GPUs: opened, and what more than one of this folder asks it."""

from __future__ import annotations

from importlib import import_module
from typing import Any

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
