"""What is there: versions, driver, links."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch

from burst_portable.backends.base import wrong_with
from burst_portable.backends.cuda.nvml import active_links
from burst_portable.backends.cuda.peers.connection import unavailable


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
    if reason := wrong_with("nvidia-ml-py", "12.560", module="pynvml"):
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
