"""Test the search for the smallest failing case, and the command that repeats it."""

from __future__ import annotations

import torch

from burst_portable.conformance import Case, check_backend
from burst_portable.conformance.cases import HEADS, product
from burst_portable.conformance.checks.attention import axes
from burst_portable.conformance.smallest_case import candidates, smallest
from tests.support import planted_bugs
from tests.support.planted_bugs import Planted


def test_smallest_finds_minimal_case():
    """The planted failure needs three ranks and a window."""
    start = next(c for c in product({**axes(8), "mask": ("window",), "ranks": (8,)}) if c.softcap and c.sinks)
    found = smallest(start, lambda case: case.ranks >= 3 and case.mask == "window")
    assert found == Case(
        mask="window", layout="contiguous", ranks=3, heads="1x1x8x8", length=3, batch=1, dtype=torch.float32
    )


def test_candidates_are_smaller_and_possible():
    case = Case(ranks=6, heads="wide_values", values="large", memory="padded", sinks=True)
    for simpler in candidates(case):
        assert simpler.possible()
        assert simpler != case
        assert simpler.sizes[0] <= max(HEADS[case.heads][0], 12)


def test_failure_has_smallest_case_and_command(failed):
    first = failed.failures[0]
    case = Case.parse(first.smallest.removeprefix("attention:"))
    assert case.ranks == 1
    assert case.mask in ("window", "window_both")
    assert case.length < 10
    assert first.command == f"burst-portable conform --backend planted --case {first.smallest}"
    again = check_backend(Planted(planted_bugs.BandOffByOne), cases=[first.smallest], coverage="quick", fail_fast=True)
    assert not again.ok
    assert check_backend("cpu", cases=[first.smallest]).ok


def test_each_failure_is_reduced(failed):
    assert len(failed.failures) > 3
    for result in failed.failures:
        tried, least = Case.parse(result.name), Case.parse(result.smallest.partition(":")[2])
        assert (least.ranks, least.length) < (tried.ranks, tried.length)
