"""Check that fresh memory is poisoned in every test and thread, and that the fixture restores the former state."""

from __future__ import annotations

import contextlib
import threading

import pytest
import torch

from tests.support.poison import fresh_memory_is_nan

FRESH = {
    "empty": lambda dtype: torch.empty(5, 3, dtype=dtype),
    "empty_like": lambda dtype: torch.empty_like(torch.zeros(5, 3, dtype=dtype)),
    "new_empty": lambda dtype: torch.zeros(1, dtype=dtype).new_empty(5, 3),
    "empty_strided": lambda dtype: torch.empty_strided((5, 3), (1, 5), dtype=dtype),
    "resize_": lambda dtype: torch.empty(0, dtype=dtype).resize_(5, 3),
}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("make", FRESH.values(), ids=list(FRESH))
def test_fresh_memory_is_nan(make, dtype):
    assert make(dtype).isnan().all()


def test_fresh_integers_are_maximum():
    assert (torch.empty(7, dtype=torch.int32) == torch.iinfo(torch.int32).max).all()


def test_fresh_memory_of_other_threads_is_nan():
    seen = []
    thread = threading.Thread(target=lambda: seen.append(torch.empty(7).isnan().all()))
    thread.start()
    thread.join()
    assert seen == [True]


@pytest.mark.parametrize(("deterministic", "warn_only", "fill"), [(False, False, True), (True, True, False)])
def test_fresh_memory_is_nan_restores_state_after_failure(deterministic, warn_only, fill):
    # The fixture around this test restores its own state.
    torch.use_deterministic_algorithms(deterministic, warn_only=warn_only)
    torch.utils.deterministic.fill_uninitialized_memory = fill
    with contextlib.suppress(KeyError), fresh_memory_is_nan():
        assert torch.empty(7).isnan().all()
        raise KeyError
    assert torch.are_deterministic_algorithms_enabled() is deterministic
    assert torch.is_deterministic_algorithms_warn_only_enabled() is warn_only
    assert torch.utils.deterministic.fill_uninitialized_memory is fill
