"""Test axolotl's trainer on two ranks that share sequences. `make setup` does not install axolotl."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.support.fork_server import run_program

pytestmark = [
    pytest.mark.full,
    pytest.mark.timeout(700),
    pytest.mark.skipif(find_spec("axolotl") is None, reason="needs axolotl"),
]


def test_axolotl_equals_one_device(tmp_path: Path) -> None:
    """Losses, norms of gradients, an evaluation and counts of tokens, with padded and packed rows."""
    found = []
    for ranks in (1, 2):
        file = tmp_path / f"{ranks}.json"
        done = run_program("tests.support.axolotl_ranks", str(ranks), str(file))
        assert done.returncode == 0, done.stdout + done.stderr
        found.append(json.loads(file.read_text(encoding="utf-8")))
    alone, shared = found
    assert alone["padded"] != alone["packed"]
    for case, expected in alone.items():
        assert shared[case] == pytest.approx(expected, rel=2e-6), case


def test_command_with_example_equals_one_process(tmp_path: Path) -> None:
    """`axolotl train` with the file of the examples, of which the model, the dataset and the device are changed."""
    states, weights = [], []
    for ranks in (1, 2):
        folder = tmp_path / str(ranks)
        done = run_program("tests.support.axolotl_command", str(ranks), str(folder), timeout=300)
        assert done.returncode == 0, done.stdout + done.stderr
        (state,) = folder.glob("model/checkpoint-*/trainer_state.json")
        states.append(json.loads(state.read_text(encoding="utf-8")))
        weights.append(load_file(folder / "model" / "model.safetensors"))
    alone, shared = [[log["loss"] for log in state["log_history"] if "loss" in log] for state in states]
    assert len(alone) >= 3
    assert [state["epoch"] for state in states] == [1, 1]
    assert shared == pytest.approx(alone, rel=2e-6)
    for name, weight in weights[0].items():
        torch.testing.assert_close(weights[1][name], weight, rtol=0, atol=1e-5)
