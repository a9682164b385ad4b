"""Test the benchmark of host time without a device: what it compares, and how it is called."""

import pytest
import torch

import burst_portable
from benchmarks.host_time import calls_of, least_times, main, pairs
from burst_portable.errors import BackendUnavailableError, UnsupportedError

CPU = torch.device("cpu")


@pytest.mark.parametrize("heads", [(4, 4), (4, 2)])
def test_calls_of_all_entries_are_timed(monkeypatch, heads):
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda: None)
    found = least_times(calls_of(33, heads, 16, CPU), rounds=1)
    assert list(found) == [
        f"{name}, {which}"
        for name in ("attention", "attention without a mesh", "SDPA")
        for which in ("forward", "both passes")
    ]
    assert all(0 < least < 1e7 for least in found.values())


def test_wrong_result_is_not_timed(monkeypatch):
    right = burst_portable.attention
    monkeypatch.setattr(burst_portable, "attention", lambda *x, **options: 1.1 * right(*x, **options))
    with pytest.raises(UnsupportedError, match="attention differs from SDPA"):
        calls_of(33, (2, 1), 16, CPU)


def test_heads_are_parsed():
    assert pairs("8/8,8/2") == [(8, 8), (8, 2)]


def test_benchmark_needs_device(monkeypatch):
    monkeypatch.setattr("sys.argv", ["host_time"])
    with pytest.raises(BackendUnavailableError, match="torch sees none"):
        main()
