"""Test the spread that the benchmark of the checks reports."""

import pytest

from benchmarks.guards import quartiles, ratios


def test_ratios_are_taken_in_each_round():
    """A machine that is five times as slow in the last rounds changes no ratio, but that of the medians."""
    pairs = [(11, 10), (11, 10), (12, 10), (50, 50), (55, 50)]
    times = {"step": [(a, 2 * b) for a, b in pairs], "step without checks": [(b, b) for _, b in pairs]}
    found = ratios(times)
    assert found["elapsed"] == pytest.approx((1.1, 1.1, 1.1))
    assert found["processor"] == (2, 2, 2)


def test_quartiles_of_one_value():
    assert quartiles([3.0]) == (3.0, 3.0, 3.0)
    assert quartiles([4, 1, 2, 3, 5]) == (2, 3, 4)
