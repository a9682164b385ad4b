"""Test that the checks of a sharded model do not make the host wait for a device.

python -m pytest -m device tests/device/test_guards.py
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.support.device_programs import run_ranks

pytestmark = [
    pytest.mark.device,
    pytest.mark.timeout(200),
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs; torch reports waits of CUDA only"),
]
RANKS = 2


@pytest.fixture(scope="module")
def waits(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, list[str]]]:
    """Return, for each rank and case, the lines of the package that waited, and "" for each wait of other code."""
    pytest.importorskip("transformers")
    folder: Path = tmp_path_factory.mktemp("guards")
    assert run_ranks("device_guards", folder, RANKS, timeout=180) == ""
    found = [json.loads((folder / f"waits {rank}.json").read_text()) for rank in range(RANKS)]
    print(json.dumps(found, indent=1))
    return found


@pytest.mark.parametrize("case", ["llama", "packed", "full batches", "experts", "fsdp"])
def test_training_step_does_not_wait(waits: list[dict[str, list[str]]], case: str) -> None:
    """Transformers' own code waits once per call, also on one device, to see whether position ids restart."""
    for found in waits:
        assert [place for place in found[case] if place] == []
        if case not in ("experts", "fsdp"):
            assert len(found[case]) <= len(found["llama on one device"])


def test_wait_of_missing_gradient_is_recorded(waits: list[dict[str, list[str]]]) -> None:
    """A rank without a gradient waits once: it reads how many ranks have one."""
    names = [[place.rpartition(":")[0] for place in found["without gradient"]] for found in waits]
    assert names == [[], ["gradients.py:_sum_bucket"]]
