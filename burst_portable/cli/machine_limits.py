"""Read the cores and the memory of this machine, and reject commands that exceed them before a process starts."""

from __future__ import annotations

import math
import os

from burst_portable.errors import InputError
from burst_portable.utils.text import bytes_text

_RANKS_PER_CORE = 8
_RANKS_ALWAYS_ALLOWED = 16


def check_processes(ranks: int, available_cores: int | None = None) -> None:
    """Raise `InputError` for too many processes per core. `available_cores` defaults to `cores()`."""
    found = cores() if available_cores is None else available_cores
    limit = max(_RANKS_ALWAYS_ALLOWED, _RANKS_PER_CORE * found)
    if ranks > limit:
        raise InputError(
            "too many ranks for this machine's cores, as each rank is a process",
            got=f"--ranks {ranks}, {found} cores",
            allowed=f"at most {limit} ({_RANKS_PER_CORE} per core, or {_RANKS_ALWAYS_ALLOWED})",
            next_step="`burst-portable plan` takes any number of ranks and needs no device",
        )


def check_memory(
    parameters: int,
    vocabulary: int,
    *,
    tokens: int,
    copies: int,
    itemsize: int,
    training: bool,
    available: float | None = None,
) -> None:
    """Raise `InputError` if weights and logits alone, a lower bound, exceed this machine's memory.

    Each of `copies` processes has the model. With `training`, the gradients of both and AdamW's two moments are added.
    """
    available = memory() if available is None else available
    weights = copies * parameters * itemsize * (4 if training else 1)
    logits = tokens * vocabulary * 4 * (2 if training else 1)
    if weights + logits > available:
        raise InputError(
            "the run does not fit this machine's memory",
            got=f"{bytes_text(weights)} of weights{', gradients and moments' if training else ''} over all ranks "
            f"and {bytes_text(logits)} of logits",
            allowed=f"{bytes_text(available)} together",
            next_step="use a smaller model, --seq-len, --batch or --ranks",
        )


def check_tensor_memory(size: int, copies: int) -> None:
    """Raise `InputError` if tensors of `size` bytes in each of `copies` processes exceed this machine's memory."""
    if size * copies > (available := memory()):
        raise InputError(
            "the measured tensors do not fit this machine's memory",
            got=f"{bytes_text(size)} of q, k, v and gradients per rank, {copies} rank{'' if copies == 1 else 's'}",
            allowed=f"{bytes_text(available)} together",
            next_step="use a smaller --seq-len, --heads, --head-dim or --ranks",
        )


def cores() -> int:
    """Return the number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def memory() -> float:
    """Return the bytes of memory of this machine; infinite if the system does not report them."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return math.inf
