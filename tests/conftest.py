"""What every test stands on: poisoned memory, fixed seeds, few threads."""

from __future__ import annotations

import gc
import random

import hypothesis
import numpy as np
import pytest
import torch

from tests.support.compilers import compilers  # noqa: F401  (a fixture)
from tests.support.poison import fresh_memory_is_nan
from tests.support.triton_interpreter import ask  # noqa: F401  (a fixture)

# Ranks are threads here, each with torch's own threads below it: more of those only fight over two cores.
torch.set_num_threads(1)

# A timeout measures the machine that two sessions share, not the code.
hypothesis.settings.register_profile("burst_portable", deadline=None)
hypothesis.settings.load_profile("burst_portable")


def pytest_addoption(parser):
    parser.addoption(
        "--backend", default="cpu", help="where tests/conformance/test_suite_planted_bugs.py plants its bugs"
    )


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """What is collected and imported stays to the end: Python need not look for garbage in it, then and ever after."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.fixture(autouse=True)
def poisoned_memory():
    with fresh_memory_is_nan():
        yield


@pytest.fixture(autouse=True)
def seeds():
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Processes that share the tests must find the same names; an address in one is another in each."""
    if unsteady := [item.nodeid for item in items if " at 0x" in item.nodeid]:
        raise pytest.UsageError(f"names of tests hold addresses, give ids: {unsteady[0]} and {len(unsteady) - 1} more")
