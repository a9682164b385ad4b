"""The priority of the stream on which NCCL's kernels run.

Kernels that fill a device keep NCCL's waiting, which started later, until one of their programs ends. If its stream
has priority, the next place that is free is NCCL's; else all programs that wait for one go before it.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist


def high_priority(timeout: timedelta) -> Any:
    """Options of a process group whose stream has it; None where this torch has no NCCL."""
    if not (dist.is_available() and dist.is_nccl_available()):
        return None
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    options._timeout = timeout  # torch warns where it is not that of the group
    return options


def goes_first(group: Any) -> bool:
    """Whether the stream of a group (None: the default one) has it; only NCCL's can be asked, others count as no."""
    found: Any = dist.group.WORLD if group is None else group
    try:
        options = getattr(found._get_backend(torch.device("cuda")), "options", None)
    except RuntimeError:  # the group has nothing for this device; its first message says so
        return False
    return bool(getattr(options, "is_high_priority_stream", False))
