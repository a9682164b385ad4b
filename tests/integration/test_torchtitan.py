"""Test torchtitan's Llama on two context-parallel ranks against one device."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.fork_server import run_program


@pytest.mark.slow
def test_torchtitan_equals_one_device(tmp_path: Path):
    """Losses and all gradients: with FSDP2 and recomputation, packed rows, and both layouts. Ranks check errors."""
    done = run_program("tests.support.torchtitan_ranks", tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
