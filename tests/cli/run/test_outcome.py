"""Test how a run is compared with one device."""

from __future__ import annotations

import math

import pytest
import torch

from burst_portable.cli.run.outcome import gradient_differences, relative_differences


def test_unmeasurable_differences_are_infinite():
    assert relative_differences([1.0, math.nan, 1.0], [1.0, 1.0, math.inf]) == [0.0, math.inf, math.inf]
    one, other_shape = {"a": torch.ones(2)}, {"a": torch.ones(3)}
    assert gradient_differences(one, other_shape).together == math.inf
    assert gradient_differences(one, {"b": torch.ones(2)}).together == math.inf
    assert gradient_differences({"a": torch.tensor([math.nan])}, {"a": torch.ones(1)}).parameter == math.inf


def test_small_wrong_gradient_is_found_next_to_large_one():
    reference = {"large": 1000 * torch.ones(4), "small": torch.ones(4), "zero": torch.zeros(4)}
    gradients = {**reference, "small": 1.1 * torch.ones(4), "zero": torch.full((4,), 1e-6)}
    apart = gradient_differences(gradients, reference)
    assert apart.together == pytest.approx(1e-4, rel=1e-3)
    assert (apart.parameter, apart.name) == (pytest.approx(0.1), "small")
