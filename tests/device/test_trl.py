"""Test TRL's supervised fine-tuning on two devices that share sequences, against one device.

python -m pytest -m device tests/device/test_trl.py
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from tests.support.device_programs import run_ranks

MISSING = [name for name in ("trl", "accelerate", "datasets", "pyarrow", "pandas") if find_spec(name) is None]
pytestmark = [
    pytest.mark.device,
    pytest.mark.timeout(300),
    pytest.mark.skipif(torch.accelerator.device_count() < 2, reason="needs two accelerators or more"),
    pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)}"),
]
RANKS = 2


@pytest.mark.parametrize("kind", ["sft", "packed"])
def test_fine_tuning_equals_one_device(kind: str, tmp_path: Path) -> None:
    """Losses, norms, accuracies and counts of tokens, and the changes of weights in two steps."""
    for ranks in (1, RANKS):
        if missing := run_ranks("device_trl", tmp_path, ranks, kind, timeout=120):
            pytest.skip(missing)
    expected = torch.load(tmp_path / f"{kind} 0 of 1.pt")
    weights, initial = expected.pop("weights"), expected.pop("initial")
    for rank in range(RANKS):
        found = torch.load(tmp_path / f"{kind} {rank} of {RANKS}.pt")
        for name, values in expected.items():
            assert found[name] == pytest.approx(values, rel=1e-4), name
        for name, before in initial.items():
            change = weights[name] - before
            assert (found["weights"][name] - weights[name]).norm() < 2e-3 * change.norm(), name
