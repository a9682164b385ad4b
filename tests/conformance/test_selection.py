"""Test the names of tests, and which tests a selection contains."""

from __future__ import annotations

from burst_portable.backends.selection import load
from burst_portable.conformance.base import BackendUnderTest
from burst_portable.conformance.checks import CHECKS
from burst_portable.conformance.selection import find_test, list_tests, select_tests
from tests.support import planted_bugs
from tests.support.planted_bugs import Planted


def test_trial_texts_are_unique_and_parse():
    target = BackendUnderTest(Planted(planted_bugs.KernelWrapper), 4, "quick")
    texts = [test.text for test in list_tests(target)]
    assert len(set(texts)) == len(texts)
    assert {text.partition(":")[0] for text in texts} == set(CHECKS)
    for text in texts[:: len(texts) // 12]:
        assert find_test(target, text).text == text


def test_strategies_are_tested_on_every_number_of_ranks():
    for coverage in ("quick", "usual"):
        target = BackendUnderTest(load("cpu"), coverage=coverage, strategy="ring")
        ranks = {test.case.ranks for test in select_tests(target) if test.case}
        assert {1, 2, 3, 4, 5, 7} <= ranks, coverage
        assert (coverage == "quick") or ranks == set(range(1, 9))
