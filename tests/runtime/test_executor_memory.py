"""Test that a rank holds only its shard and the blocks in flight: live tensor memory, counted by operation."""

from __future__ import annotations

from functools import cache

import pytest
import torch

from tests.support.live_memory import KV_BYTES, LENGTH, RESULT_BYTES, LiveMemory, measured

usage = cache(measured)
"""Peaks and largest tensors of the ranks, which both tests read."""


@pytest.mark.parametrize("strategy", ["ring", "burst", "double_ring"])
def test_peak_memory_falls_with_ranks(strategy):
    peaks = {ranks: max(m.peak for m in usage(ranks, strategy)) for ranks in (1, 2, 4, 8)}
    # One rank has only its results. Two ranks also hold blocks, and merge and sum results in wider dtypes (float64 out,
    # from float32 tensors). From two to four ranks, a second block is in flight, or a third one for the outer ring.
    # With more ranks, all memory is proportional to the shard.
    assert peaks[1] < 1.1 * RESULT_BYTES
    assert peaks[2] < (1.5 if strategy == "ring" else 1.82) * RESULT_BYTES
    assert peaks[4] < 0.85 * peaks[2]
    assert peaks[8] < 0.8 * peaks[4]


@pytest.mark.parametrize("strategy", ["ring", "burst", "double_ring"])
def test_no_tensor_is_as_large_as_full_kv(strategy):
    """On 8 ranks, no tensor has S x S elements or nearly the size of all K and V."""
    for memory in usage(8, strategy):
        assert memory.largest < KV_BYTES / 2
        assert memory.largest < LENGTH * LENGTH * 4 / 16


def test_live_memory_counts_live_tensors():
    with LiveMemory() as memory:
        a = torch.zeros(1000)
        b = a + 1
        del a
        torch.zeros(500)
        assert memory.peak == 8000
        assert b.numel() == 1000
    assert memory.largest == 4000
