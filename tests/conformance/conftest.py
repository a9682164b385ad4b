"""Fixtures: the report of a backend with a planted bug, and an oracle that computes each case once per file."""

from __future__ import annotations

import pytest

from burst_portable.conformance import Report, check_backend
from tests.support import planted_bugs
from tests.support.planted_bugs import Planted
from tests.support.remembered_oracle import Remembering


@pytest.fixture(scope="module", autouse=True)
def oracle_of_file(remembered_oracle: Remembering) -> None:
    """Share answers of the oracle between the reports of a file, which have the same cases."""


@pytest.fixture(scope="module")
def failed(remembered_oracle: Remembering) -> Report:
    return check_backend(Planted(planted_bugs.BandOffByOne), ranks=3, only=["attention"], coverage="quick")
