"""Fill fresh memory with NaN, so that a kernel that does not write a row fails.

`torch.empty` mostly returns zeros in a young process, and zeros look correct. The switch is a global one of torch and
applies to every thread. A spawned rank is another process and sets it for itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def fresh_memory_is_nan() -> Iterator[None]:
    """Fill the memory of empty, empty_like, new_empty, resize_ ... with NaN, or the maximum of integers."""
    mode = torch.get_deterministic_debug_mode()
    fill = torch.utils.deterministic.fill_uninitialized_memory
    # torch fills memory in deterministic mode only. `use_deterministic_algorithms` is not used here, because it loads
    # torch's compiler, which takes more than a second per process.
    torch.set_deterministic_debug_mode("error")
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        yield
    finally:
        torch.utils.deterministic.fill_uninitialized_memory = fill
        torch.set_deterministic_debug_mode(mode)
