"""List the releases of torch that can compile in one thread after another."""

from __future__ import annotations

import pytest
import torch

RELEASE = tuple(map(int, torch.__version__.split(".")[:2]))

on_threads = pytest.mark.skipif(
    RELEASE < (2, 12),
    reason="its ranks, as threads, compile: torch documents that this is not thread-safe, and 2.11 ends the process",
)
