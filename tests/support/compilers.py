"""Fixture: processes that compile kernels for the tests that read machine code."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from concurrent.futures import Executor, ProcessPoolExecutor

import pytest

from tests.support.forked_python import forked_multiprocessing


@pytest.fixture(scope="module")
def compilers(forked_python: str) -> Iterator[Executor]:
    """Start processes on both cores of CI, because these tests mostly compile."""
    context = multiprocessing.get_context("spawn")
    with forked_multiprocessing(forked_python), ProcessPoolExecutor(2, mp_context=context) as pool:
        yield pool
