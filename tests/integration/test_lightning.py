"""Test Lightning on two ranks that share sequences, against one device, and on four ranks, against its DDP."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.fork_server import run_program

FULL = ["fsdp", "own head", "checkpointed", "resumed", "manual"]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]


def run(program: str, *arguments: object) -> str:
    done = run_program(program, *arguments, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def assert_same(folder: Path, names: list[str], sequences: int = 1) -> None:
    """Check logged numbers, norms of gradients, a validation, a prediction and weights. Ranks also check errors."""
    run("tests.support.lightning_ranks", folder, sequences, *names)
    logged: dict[str, Any] = {"rtol": 1e-6, "atol": 1e-6}  # float32
    for name in names:
        for rank in range(2 * sequences):
            found = torch.load(folder / f"{name} {rank}.pt")
            expected = torch.load(folder / f"{name} {2 * sequences + rank // 2}.pt")
            for key, value in expected.items():
                options = logged if key in ("logged", "validated") else {"rtol": 1e-9, "atol": 1e-11}
                torch.testing.assert_close(found[key], value, **options)
            assert found["logged"]["tokens"] == 172


def test_lightning_equals_one_device(tmp_path: Path):
    assert_same(tmp_path, ["fit"])


@pytest.mark.full
def test_lightning_with_options_equals_one_device(tmp_path: Path):
    assert_same(tmp_path, FULL)


@pytest.mark.full
def test_lightning_with_two_sequences_equals_data_parallel(tmp_path: Path):
    assert_same(tmp_path, ["fit", *FULL], sequences=2)


@pytest.mark.full
@pytest.mark.parametrize(("saving", "loading"), [(2, 3), (3, 2), (1, 2), (2, 4)])
def test_fsdp_checkpoint_resumes_on_other_ranks(saving: int, loading: int, tmp_path: Path):
    """An epoch on some ranks, and the next one on others. Each epoch validates, and generates three batches."""
    run("tests.support.lightning_checkpoint_ranks", tmp_path, 1, 2)
    expected = torch.load(tmp_path / "1 2.pt")
    run("tests.support.lightning_checkpoint_ranks", tmp_path, saving, 1)
    first = torch.load(tmp_path / f"{saving} 1.pt")
    run("tests.support.lightning_checkpoint_ranks", tmp_path, loading, 2, tmp_path / f"{saving} 1.ckpt")
    found = torch.load(tmp_path / f"{loading} 2.pt")
    assert not torch.equal(first["weights"]["model.lm_head.weight"], found["weights"]["model.lm_head.weight"])
    # Three ranks scale losses, which are float32, with rounding.
    torch.testing.assert_close(found["weights"], expected["weights"], rtol=1e-6, atol=1e-7)
    assert len(expected["generated"]) == 8  # two before the training
    assert all(map(torch.equal, first["generated"], expected["generated"][:5]))
    assert all(map(torch.equal, found["generated"][-3:], expected["generated"][-3:]))


@pytest.mark.full
def test_lightning_example_equals_one_device():
    def losses(devices: str) -> list[float]:
        found = re.search(r"^losses: (.*)$", run("examples/train_with_lightning.py", "--devices", devices), re.M)
        assert found
        return [float(x) for x in found[1].split()]

    assert losses("2") == pytest.approx(losses("1"), rel=2e-6)
