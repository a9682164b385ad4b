"""Test DeepSpeed's ZeRO stages on ranks that share sequences. `make setup` does not install DeepSpeed."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.support.fork_server import run_program

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "train_with_deepspeed.py"

pytestmark = [
    pytest.mark.full,
    pytest.mark.timeout(480),
    pytest.mark.skipif(find_spec("deepspeed") is None, reason="needs DeepSpeed, which compiles C++ in its first run"),
]


@pytest.mark.parametrize("kind", ["language model", "classifier"])
@pytest.mark.parametrize("sequences", [1, 2])
def test_zero_stages_equal_one_device(sequences: int, kind: str, tmp_path: Path):
    """Train each stage with accumulation and clipping, and compare losses and weights. Ranks check errors."""
    done = run_program("tests.support.deepspeed_ranks", tmp_path, sequences, kind, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr


def test_deepspeed_example_equals_one_device():
    def losses(ranks: int) -> list[float]:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", EXAMPLE]
        done = subprocess.run([*map(str, command)], capture_output=True, text=True, timeout=220)
        found = re.search(r"^losses: (.*)$", done.stdout, re.M)
        assert found, done.stdout + done.stderr
        return [float(x) for x in found[1].split()]

    assert losses(2) == pytest.approx(losses(1), rel=2e-6)
