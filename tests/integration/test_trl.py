"""Test TRL's trainers on two ranks that share sequences, against one device, and on four ranks, against DDP."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.support.fork_server import run_program

USUAL = ["packed sft", "dpo of adapters"]
FULL = ["sft", "sft of adapters", "checkpointed sft", "dft", "dpo", "ipo with weights", "grpo", "grpo of adapters"]
EXPERTS = ["sft of experts", "packed sft of experts", "dpo of experts", "grpo of experts"]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]


def trained(folder: Path, names: list[str], sequences: int = 1) -> Path:
    """Return the folder with the results of each process. The processes also check what raises an error."""
    done = run_program("tests.support.trl_ranks", folder, sequences, *names, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.fixture(scope="module")
def usual(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained(tmp_path_factory.mktemp("trl"), USUAL)


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained(tmp_path_factory.mktemp("trl"), FULL + EXPERTS)


def assert_same(folder: Path, name: str, ranks: int = 2) -> None:
    """Check the losses, metrics, counts of tokens and weights of two steps and an evaluation."""
    *shared, expected = (torch.load(folder / f"{name} {rank}.pt") for rank in range(ranks + 1))
    assert expected["logged"][-1]["eval_loss"] > 0
    assert ("eval_aux_loss" in expected["logged"][-1]) == ("experts" in name)
    for found in shared:
        torch.testing.assert_close(found, expected, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("name", USUAL)
def test_trl_equals_one_device(name: str, usual: Path) -> None:
    assert_same(usual, name)


@pytest.mark.full
@pytest.mark.parametrize("name", FULL + EXPERTS)
def test_trl_with_options_equals_one_device(name: str, full: Path) -> None:
    assert_same(full, name)


@pytest.mark.full
def test_trl_with_two_sequences_equals_data_parallel(tmp_path: Path) -> None:
    names = ["sft", "dpo", "grpo", "sft of experts", "dpo of experts"]
    trained(tmp_path, names, sequences=2)
    for name in names:
        assert_same(tmp_path, name, ranks=4)
