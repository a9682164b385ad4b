"""Test how a run is compared with one device."""

from __future__ import annotations

import math

import pytest
import torch

from burst_portable.cli.run.outcome import gradient_error, relative_differences


def test_unmeasurable_differences_are_infinite():
    assert relative_differences([1.0, math.nan, 1.0], [1.0, 1.0, math.inf]) == [0.0, math.inf, math.inf]
    one, other_shape = {"a": torch.ones(2)}, {"a": torch.ones(3)}
    assert gradient_error(one, other_shape)[0] == math.inf
    assert gradient_error(one, {"b": torch.ones(2)})[0] == math.inf
    assert gradient_error({"a": torch.tensor([math.nan])}, {"a": torch.ones(1)})[1] == math.inf


def test_small_wrong_gradient_is_found_next_to_large_one():
    reference = {"large": 1000 * torch.ones(4), "small": torch.ones(4), "zero": torch.zeros(4)}
    gradients = {**reference, "small": 1.1 * torch.ones(4), "zero": torch.full((4,), 1e-6)}
    total, largest, name = gradient_error(gradients, reference)
    assert total == pytest.approx(1e-4, rel=1e-3)
    assert (largest, name) == (pytest.approx(0.1), "small")
