"""What is there: architecture, versions, driver, links."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch

from burst_portable.backends.base import wrong_with


def architecture(properties: Any) -> str:
    """gfx942:sramecc+:xnack- -> gfx942."""
    return str(properties.gcnArchName).partition(":")[0]


NO_PEER_COPIES = "no: HIP documents stream waits for its own signal memory alone, not for what a peer writes"
"""As of ROCm 7.0 (hipStreamWaitValue32). A flag would cost a kernel, which peer copies are there to spare."""


def libraries() -> dict[str, Any]:
    """Libraries as torch sees them; driver and links where amdsmi can be asked."""
    return {
        "hip": torch.version.hip,
        "miopen": torch.backends.cudnn.version(),
        "rccl": ".".join(map(str, torch.cuda.nccl.version())) if torch.distributed.is_nccl_available() else "absent",
        "flash": str(torch.backends.cuda.preferred_rocm_fa_library()).rpartition(".")[2],
        "peer_copy": NO_PEER_COPIES,
        **amdsmi_facts(),
    }


def amdsmi_facts() -> dict[str, Any]:
    """Driver and xGMI links from amdsmi; the reason where it cannot be asked: absent, too old or broken.

    Broken is mostly bindings without ROCm's libamd_smi.so: they raise KeyError, OSError or AttributeError.
    """
    install = "pip install the amdsmi of the installed ROCm: /opt/rocm/share/amd_smi has it"
    if reason := wrong_with("amdsmi", "6.3", module="amdsmi", install=install):
        return {"amdsmi": reason}
    smi = import_module("amdsmi")
    try:
        smi.amdsmi_init()
    except smi.AmdSmiException as error:
        return {"amdsmi": f"not available: {' '.join(str(error).split())}"}
    try:
        devices = smi.amdsmi_get_processor_handles()
        return {
            "driver": smi.amdsmi_get_gpu_driver_info(devices[0])["driver_version"],
            "xgmi_peers": [sum(_linked(smi, one, other) for other in devices if other is not one) for one in devices],
        }
    except (smi.AmdSmiException, IndexError) as error:  # a virtual machine may hide the topology
        return {"amdsmi": f"tells nothing: {' '.join(str(error).split())}"}
    finally:
        smi.amdsmi_shut_down()


def _linked(smi: Any, one: Any, other: Any) -> bool:
    """Whether two devices talk over xGMI, not PCIe."""
    return bool(smi.amdsmi_topo_get_link_type(one, other)["type"] == smi.AmdSmiLinkType.AMDSMI_LINK_TYPE_XGMI)
