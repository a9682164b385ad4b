"""Configure all tests: poisoned memory, fixed seeds, one torch thread per rank."""

from __future__ import annotations

import gc
import random

import hypothesis
import numpy as np
import pytest
import torch

from tests.support.compilers import compilers  # noqa: F401  (a fixture)
from tests.support.forked_python import forked_python, pytest_configure, ranks_are_forked  # noqa: F401  (fixtures)
from tests.support.forked_python_server import RARE_COLLECTIONS
from tests.support.poison import fresh_memory_is_nan
from tests.support.remembered_oracle import remembered_oracle  # noqa: F401  (a fixture)
from tests.support.triton_interpreter import ask  # noqa: F401  (a fixture)

# Ranks are threads here. More threads of torch per rank would only compete for two cores.
torch.set_num_threads(1)

# The duration of an example depends on the machine, which other processes share.
hypothesis.settings.register_profile("burst_portable", deadline=None)
hypothesis.settings.load_profile("burst_portable")


def pytest_addoption(parser):
    parser.addoption(
        "--backend", default="cpu", help="where tests/conformance/test_suite_planted_bugs.py plants its bugs"
    )


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Exclude collected and imported objects from garbage collection, because they exist until the end.

    Tests import further modules and fill caches, which each full collection would read again. They are rare from here.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.set_threshold(*RARE_COLLECTIONS)
        gc.enable()


@pytest.fixture(autouse=True)
def poisoned_memory():
    with fresh_memory_is_nan():
        yield


@pytest.fixture(autouse=True)
def seeds():
    random.seed(0)
    np.random.seed(0)
    # torch.manual_seed records a stack per kind of device, even in a build that has none.
    (torch.manual_seed if torch.accelerator.current_accelerator() else torch.default_generator.manual_seed)(0)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Raise if a test name contains an address. Processes that share the tests must find equal names."""
    if unsteady := [item.nodeid for item in items if " at 0x" in item.nodeid]:
        raise pytest.UsageError(f"names of tests hold addresses, give ids: {unsteady[0]} and {len(unsteady) - 1} more")
