"""Test that `make setup` rejects an unsuitable Python in one line, before it creates any file."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def set_up(clone: Path, python: str) -> subprocess.CompletedProcess[str]:
    (clone / "ci").mkdir()
    shutil.copy(ROOT / "ci" / "setup.sh", clone / "ci")
    command = ["sh", str(clone / "ci" / "setup.sh")]
    environment = {"PATH": "/usr/bin:/bin", "PYTHON": python}
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def fake_python(path: Path, script: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return path


@pytest.mark.parametrize("script", ["exit 1", "echo no such version >&2; exit 127"])
def test_setup_rejects_unsupported_python(tmp_path, script):
    done = set_up(tmp_path, str(fake_python(tmp_path / "bin" / "python3.9", script)))
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert "found no Python 3.11, 3.12 or 3.13" in done.stderr
    assert not (tmp_path / ".venv").exists()


def test_setup_rejects_venv_of_unsupported_python(tmp_path):
    fake_python(tmp_path / ".venv" / "bin" / "python", "exit 1")
    done = set_up(tmp_path, "python3")
    assert done.returncode == 1
    assert done.stderr == "setup: the Python in .venv is not 3.11, 3.12 or 3.13; remove .venv and run make again\n"
