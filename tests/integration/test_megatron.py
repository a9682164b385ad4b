"""Test Megatron-core's GPT on two context-parallel ranks. `make setup` does not install Megatron-core."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.support.fork_server import run_program

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "train_with_megatron.py"

pytestmark = [
    pytest.mark.full,
    pytest.mark.timeout(240),
    pytest.mark.skipif(find_spec("megatron") is None, reason="needs Megatron-core"),
]


def test_megatron_equals_one_device(tmp_path: Path):
    """Losses and all gradients. Ranks also compare the stand-ins of tests/integrations/test_megatron.py."""
    done = run_program("tests.support.megatron_ranks", tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr


def test_megatron_example_equals_one_device():
    def losses(ranks: int) -> list[float]:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", EXAMPLE]
        done = subprocess.run([*map(str, command)], capture_output=True, text=True, timeout=100)
        found = re.search(r"^losses: (.*)$", done.stdout, re.M)
        assert found, done.stdout + done.stderr
        return [float(x) for x in found[1].split()]

    assert losses(2) == pytest.approx(losses(1), rel=2e-6)
