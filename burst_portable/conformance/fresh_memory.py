"""Fill fresh memory with NaN in all tests, so that a result which a kernel does not write is seen."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def testing_environment() -> Iterator[None]:
    """Fill fresh memory with NaN, and use one torch thread: ranks are threads and would compete for cores."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with fresh_memory_is_nan():
            yield
    finally:
        torch.set_num_threads(threads)


@contextmanager
def fresh_memory_is_nan() -> Iterator[None]:
    """Fill tensors of empty, empty_like, new_empty etc. with NaN. Integers, including messages, become all ones."""
    mode = torch.get_deterministic_debug_mode()
    switch: Any = torch.utils.deterministic  # mypy does not see the property of this module
    fill = switch.fill_uninitialized_memory
    # torch fills only in deterministic mode. "warn": nondeterministic operators of a backend raise nothing here.
    # `use_deterministic_algorithms` would load torch's compiler, more than a second per process.
    torch.set_deterministic_debug_mode("warn")
    switch.fill_uninitialized_memory = True
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*deterministic.*")
            yield
    finally:
        switch.fill_uninitialized_memory = fill
        torch.set_deterministic_debug_mode(mode)
