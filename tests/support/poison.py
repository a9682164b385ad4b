"""Fresh memory full of NaN, so that a kernel which forgets to write a row cannot pass by luck.

`torch.empty` mostly finds zeros in a young process, and zeros look right. The switch is torch's own, global,
and reaches every thread; a spawned rank is another process and turns it on for itself.
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
    # torch fills in deterministic mode only. Not by `use_deterministic_algorithms`, which loads torch's compiler: more
    # than a second of every process.
    torch.set_deterministic_debug_mode("error")
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        yield
    finally:
        torch.utils.deterministic.fill_uninitialized_memory = fill
        torch.set_deterministic_debug_mode(mode)
