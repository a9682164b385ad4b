"""Test accelerate's loop and Transformers' Trainer on two devices that share sequences, against one device.

python -m pytest -m device tests/device/test_accelerate.py
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.device_programs import run_ranks

pytestmark = [
    pytest.mark.device,
    pytest.mark.timeout(300),
    pytest.mark.skipif(torch.accelerator.device_count() < 2, reason="needs two accelerators or more"),
    pytest.mark.skipif(find_spec("accelerate") is None, reason="accelerate is not installed"),
]
RANKS = 2


def run(folder: Path, kind: str, ranks: int) -> None:
    if missing := run_ranks("device_accelerate", folder, ranks, kind, timeout=120):
        pytest.skip(missing)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return the results of one device without this library."""
    folder = tmp_path_factory.mktemp("alone")
    run(folder, "alone", 1)
    return torch.load(folder / "alone.pt")


@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_data_parallel_training_equals_one_device(kind: str, alone: dict[str, Any], tmp_path: Path) -> None:
    """Losses, norms of gradients, and the changes of weights in two steps of two batches each."""
    run(tmp_path, kind, RANKS)
    for rank in range(RANKS):
        found = torch.load(tmp_path / f"{kind} {rank}.pt")
        for name in ("loop", "trainer"):
            one, expected = dict(found[name]), dict(alone[name])
            weights, expected_weights = one.pop("weights"), expected.pop("weights")
            assert one.keys() == expected.keys()
            for key, values in expected.items():
                assert one[key] == pytest.approx(values, rel=1e-4), (name, key)
            assert weights.keys() == expected_weights.keys()
            for key, before in alone["initial"].items():
                change = expected_weights[key] - before
                assert (weights[key] - expected_weights[key]).norm() < 2e-3 * change.norm(), (name, key)
