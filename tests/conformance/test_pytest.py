"""Test the decorator that makes tests of the conformance suite."""

from __future__ import annotations

import pytest

from burst_portable.conformance.pytest import backend_checks
from tests.support import planted_bugs
from tests.support.planted_bugs import Planted

# --------------------------------------------------------------------------------------------------- the decorator


@backend_checks("cpu", ranks=2, coverage="quick", only=["fully_masked", "transport"])
def test_backend_checks_decorator_passes(check):
    check()


def test_backend_checks_decorator_reports_smallest_case():
    mark = backend_checks(Planted(planted_bugs.SwappedGradients), ranks=2, coverage="quick", only=["fully_masked"])
    (check, *_) = mark.args[1]
    with pytest.raises(
        pytest.fail.Exception, match=r"(?s)error of dk is.*smallest: fully_masked:.*again: burst-portable conform"
    ):
        check()


def test_backend_checks_decorator_skips_unavailable_backend():
    ((only,),) = [backend_checks("cuda").args[1]]
    assert "CUDA" in only.marks[0].kwargs["reason"]
