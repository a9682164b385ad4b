"""Fixture: processes that compile kernels for the tests that read machine code."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Executor, ProcessPoolExecutor
from multiprocessing import get_context

import pytest


@pytest.fixture(scope="module")
def compilers() -> Iterator[Executor]:
    """Start processes on both cores of CI, because these tests mostly compile."""
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool:
        yield pool
