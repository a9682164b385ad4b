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
    """Tensors of empty, empty_like, new_empty, resize_ ... start as NaN, integers as their maximum."""
    deterministic = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    fill = torch.utils.deterministic.fill_uninitialized_memory
    # torch fills in deterministic mode only.
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        yield
    finally:
        torch.utils.deterministic.fill_uninitialized_memory = fill
        torch.use_deterministic_algorithms(deterministic, warn_only=warn_only)
