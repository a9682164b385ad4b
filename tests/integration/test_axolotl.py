"""Test axolotl's trainer on two ranks that share sequences. `make setup` does not install axolotl."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.support.fork_server import run_program

pytestmark = [
    pytest.mark.full,
    pytest.mark.timeout(240),
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
        assert shared[case] == pytest.approx(expected, rel=2e-5), case
