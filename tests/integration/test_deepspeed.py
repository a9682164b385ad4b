"""Test DeepSpeed's ZeRO stages on ranks that share sequences. `make setup` does not install DeepSpeed."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.support.fork_server import run_program


@pytest.mark.full
@pytest.mark.timeout(240)
@pytest.mark.skipif(find_spec("deepspeed") is None, reason="needs DeepSpeed, which compiles C++ in its first run")
@pytest.mark.parametrize("sequences", [1, 2])
def test_zero_stages_equal_one_device(sequences: int, tmp_path: Path):
    """Train each stage with accumulation and clipping, and compare losses and weights. Ranks check errors."""
    done = run_program("tests.support.deepspeed_ranks", tmp_path, sequences, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
