"""Fixture: a folder with reports of an even run and of one with a slow rank."""

from __future__ import annotations

import pytest

from burst_portable.profiling.report import Report
from tests.support.synthetic_records import ring


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("reports")
    Report.of(ring(4, 6)).write_json(folder / "even.json")
    Report.of(ring(4, 6, slow=[2])).write_json(folder / "slow.json")
    return folder
