"""Test the limits of a machine that `run` checks before it starts ranks."""

from __future__ import annotations

import pytest

from burst_portable.cli.machine_limits import check_memory, check_processes
from burst_portable.errors import InputError


def test_check_processes_and_memory_reject_oversized_runs():
    check_processes(16, available_cores=2)
    with pytest.raises(InputError, match="at most 16"):
        check_processes(17, available_cores=2)
    check_processes(512, available_cores=64)
    # 10 weights of 4 bytes on 2 ranks, with gradients and 2 moments; 20 tokens of 4 logits, with their gradients
    sizes = {"tokens": 20, "copies": 2, "itemsize": 4, "available": 1000}
    check_memory(10, 4, **sizes, training=True)
    with pytest.raises(InputError, match="320 B of weights, gradients and moments over all ranks and 704 B of logits"):
        check_memory(10, 4, **{**sizes, "tokens": 22}, training=True)
    check_memory(10, 4, **{**sizes, "tokens": 22}, training=False)
