"""Test how often the runner repeats a failed test."""

from __future__ import annotations

import pytest

from burst_portable.backends.selection import load
from burst_portable.conformance import Case
from burst_portable.conformance.base import BackendUnderTest, Outcome, TestCase
from burst_portable.conformance.runner import Runner


@pytest.mark.parametrize(("seconds", "runs"), [(30.0, True), (0.0, False)])
def test_runner_does_not_repeat_tests_longer_than_the_search(seconds, runs):
    """A timeout of 60 s was repeated once, for a smaller case."""
    ran = []
    test = TestCase("kernels", "slow", lambda case: ran.append(case) or Outcome(wrong="wrong"), Case(ranks=3))
    result = Runner(BackendUnderTest(load("cpu")), search_seconds=seconds).run(test)
    assert not result.ok
    assert (len(ran) > 1) is runs
