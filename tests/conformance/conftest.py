"""Fixture: the report of a backend with a planted bug."""

from __future__ import annotations

import pytest

from burst_portable.conformance import Report, check_backend
from tests.support import planted_bugs
from tests.support.planted_bugs import Planted

# ---------------------------------------------------------------------------------------------------- reports


@pytest.fixture(scope="module")
def failed() -> Report:
    return check_backend(Planted(planted_bugs.BandOffByOne), ranks=3, only=["attention"], coverage="quick")
