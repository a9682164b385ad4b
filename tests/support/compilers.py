"""Fixture: processes that compile kernels for the tests that read machine code."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Executor, ProcessPoolExecutor

import pytest

from tests.support.fork_server import server_context


@pytest.fixture(scope="module")
def compilers() -> Iterator[Executor]:
    """Start processes on both cores of CI, because these tests mostly compile."""
    with ProcessPoolExecutor(2, mp_context=server_context()) as pool:
        yield pool
