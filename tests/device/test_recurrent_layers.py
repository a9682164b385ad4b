"""Test hybrid models with the kernels of flash-linear-attention (fla) against their reference form, on two devices.

python -m pytest -m device tests/device/test_recurrent_layers.py
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
    pytest.mark.skipif(find_spec("fla") is None, reason="flash-linear-attention is not installed"),
]
RANKS = 2
ERROR = 2e-2
"""Largest error of logits or a gradient, of its norm: fla multiplies float32 in TF32."""


def error_of(found: torch.Tensor, expected: torch.Tensor) -> float:
    return ((found - expected).norm() / expected.norm()).item()


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return the results of one device by torch and by fla, and of each rank by fla."""
    pytest.importorskip("transformers")
    folder: Path = tmp_path_factory.mktemp("recurrent")
    for kind, ranks in (("reference", 1), ("fla", 1), ("fla", RANKS)):
        if missing := run_ranks("device_recurrent", folder, ranks, kind, timeout=120):
            pytest.skip(missing)
    names = ["reference 0 of 1", "fla 0 of 1", *(f"fla {rank} of {RANKS}" for rank in range(RANKS))]
    return {name: torch.load(folder / f"{name}.pt") for name in names}


CASES = pytest.mark.parametrize("case", ["one document", "packed"])


@CASES
def test_outputs_of_fla_equal_reference(results: dict[str, Any], case: str) -> None:
    """Losses, and the logits of all tokens: those of the second rank depend on states of the first one."""
    expected, *found = (one[case][0] for one in results.values())
    errors = [error_of(one["logits"], expected["logits"]) for one in found]
    print(case, errors)
    alone, *shared = errors
    assert alone < ERROR
    for one, error in zip(found[1:], shared, strict=True):
        assert one["loss"].item() == pytest.approx(expected["loss"].item(), rel=1e-3)
        assert error < 3 * alone + 1e-4


@CASES
def test_gradients_of_fla_equal_reference(results: dict[str, Any], case: str) -> None:
    """The error of two ranks is that of one: the first rank sends its states, and receives their gradients."""
    if refusals := {one["refusal"] for one in results.values()} - {""}:
        pytest.skip(f"fla: {refusals.pop()}")
    expected, *found = (one[case][1] for one in results.values())
    errors = [{name: error_of(one[name], x) for name, x in expected.items()} for one in found]
    print(case, [max(one.items(), key=lambda item: item[1]) for one in errors])
    alone, *shared = (max(one.values()) for one in errors)
    assert alone < ERROR
    for one, error in zip(found[1:], shared, strict=True):
        assert one.keys() == expected.keys()
        assert error < 3 * alone + 1e-4
