"""What every trial runs under: fresh memory full of NaN, so that a kernel which forgets a row cannot pass by luck.

`torch.empty` mostly finds zeros in a young process, and zeros look right. The switch is torch's own: global, and seen
by every thread of the process.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def examining() -> Iterator[None]:
    """Poisoned memory, and one torch thread per rank: ranks are threads, and more below them fight over the cores."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with fresh_memory_is_nan():
            yield
    finally:
        torch.set_num_threads(threads)


@contextmanager
def fresh_memory_is_nan() -> Iterator[None]:
    """Tensors of empty, empty_like, new_empty ... start as NaN, integers (so messages too) as all ones."""
    mode = torch.get_deterministic_debug_mode()
    switch: Any = torch.utils.deterministic  # a module with a property: its class is another one when it runs
    fill = switch.fill_uninitialized_memory
    # torch fills in deterministic mode only. A backend's own indeterminism is its business here: no errors for it.
    # Not by `use_deterministic_algorithms`, which loads torch's compiler: more than a second of every process.
    torch.set_deterministic_debug_mode("warn")
    switch.fill_uninitialized_memory = True
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*deterministic.*")
            yield
    finally:
        switch.fill_uninitialized_memory = fill
        torch.set_deterministic_debug_mode(mode)
