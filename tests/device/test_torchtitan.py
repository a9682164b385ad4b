"""Test torchtitan's training on two devices that share sequences, by the script of `burst-portable init torchtitan`.

python -m pytest -m device tests/device/test_torchtitan.py
"""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from tests.support.device_programs import run_ranks

pytestmark = [
    pytest.mark.device,
    pytest.mark.timeout(300),
    pytest.mark.skipif(torch.accelerator.device_count() < 2, reason="needs two accelerators or more"),
    pytest.mark.skipif(find_spec("torchtitan") is None, reason="torchtitan is not installed"),
]
RANKS, STEPS = 2, 4
Values = list[list[float]]
"""The loss and the norm of the gradients of each step."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("torchtitan")


def trained(folder: Path, attention: str, ranks: int) -> Values:
    if missing := run_ranks("device_torchtitan", folder, ranks, attention, timeout=120):
        pytest.skip(missing)
    found = [json.loads((folder / f"{attention} {rank} of {ranks}.json").read_text()) for rank in range(ranks)]
    assert all(one == found[0] for one in found)
    return found[0]


@pytest.fixture(scope="module")
def shared(folder: Path) -> Values:
    return trained(folder, "burst_portable", RANKS)


@pytest.mark.parametrize("attention", ["burst_portable", "torchtitan"])
def test_torchtitan_equals_one_device(attention: str, shared: Values, folder: Path) -> None:
    """In bfloat16, on one device by the attention of this library and by torchtitan's own."""
    alone = trained(folder, attention, 1)
    print(attention, alone, shared)
    assert len(shared) == len(alone) == STEPS
    assert shared[-1][0] < shared[0][0] - 1, "it learns"
    for (loss, norm), (expected_loss, expected_norm) in zip(shared, alone, strict=True):
        assert loss == pytest.approx(expected_loss, rel=2e-3)
        assert norm == pytest.approx(expected_norm, rel=2e-2)
