"""Test TRL's trainers on ranks that share sequences. Three processes are started once: two ranks, and one device."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
USUAL = ["packed sft", "dpo of adapters"]
FULL = ["sft", "sft of adapters", "checkpointed sft", "dft", "dpo", "ipo with weights", "grpo", "grpo of adapters"]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]


def trained(folder: Path, names: list[str]) -> Path:
    """Return the folder with the results of each process. The processes also check what raises an error."""
    command = [sys.executable, "-m", "tests.support.trl_ranks", str(folder), *names]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.fixture(scope="module")
def usual(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained(tmp_path_factory.mktemp("trl"), USUAL)


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained(tmp_path_factory.mktemp("trl"), FULL)


def assert_same(folder: Path, name: str) -> None:
    """Check the losses, metrics, counts of tokens and weights of two steps and an evaluation."""
    *ranks, expected = (torch.load(folder / f"{name} {rank}.pt") for rank in range(3))
    assert expected["logged"][-1]["eval_loss"] > 0
    for found in ranks:
        torch.testing.assert_close(found, expected, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("name", USUAL)
def test_trl_equals_one_device(name: str, usual: Path) -> None:
    assert_same(usual, name)


@pytest.mark.full
@pytest.mark.parametrize("name", FULL)
def test_trl_with_options_equals_one_device(name: str, full: Path) -> None:
    assert_same(full, name)
