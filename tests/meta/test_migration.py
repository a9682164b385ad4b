"""Run the new half of every diff of docs/migration on four ranks, and compare its results with one device."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.fork_server import run_program
from tests.support.migration_ranks import EXAMPLES, check_example, diffs

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "docs" / "migration"


def test_every_diff_has_an_example():
    assert {page.stem: len(list(diffs(page))) for page in FOLDER.glob("*.md")} == {
        name: len(examples) for name, examples in EXAMPLES.items()
    }


def test_new_half_for_one_device_runs():
    check_example(FOLDER, "flash_attn", 0)


@pytest.mark.slow
def test_new_halves_run_and_equal_one_device():
    done = run_program("tests.support.ranks_of", 4, "tests.support.migration_ranks", FOLDER)
    assert done.returncode == 0, done.stderr[-4000:]
