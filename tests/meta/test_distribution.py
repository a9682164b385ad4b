"""Build the wheel and the source distribution, install the wheel, and use it from outside the repository."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest

import burst_portable
from tests.support.fork_server import run_program

ROOT = Path(__file__).resolve().parents[2]
VERSION = burst_portable.__version__
pytestmark = pytest.mark.slow

USER = """
from typing import assert_type
import burst_portable as bp
assert_type(bp.Mask.causal(), bp.Mask)
bp.Mask.causal(1)  # type: ignore[call-arg]
"""

# Without torch, which takes a minute to read; tests/meta/test_typed.py checks more, with torch.
MYPY = """
[mypy]
strict = True
[mypy-torch.*,transformers.*,numpy.*]
follow_imports = skip
"""


def run(*command: str | Path, cwd: Path) -> str:
    """Return the output of a command that must succeed, without this repository on Python's path."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def build(kind: str, source: Path, folder: Path) -> Path:
    """Return the wheel or source distribution of a source tree, built with the backend of pyproject.toml."""
    folder.mkdir(exist_ok=True)
    run(sys.executable, "-m", "hatchling", "build", "-t", kind, "-d", folder, cwd=source)
    return next(folder.glob("*.whl" if kind == "wheel" else "*.tar.gz"))


def package_files(names: list[str]) -> set[str]:
    return {name for name in names if name.startswith("burst_portable/")}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    return build("wheel", ROOT, tmp_path_factory.mktemp("dist"))


@pytest.fixture(scope="module")
def venv(wheel) -> Path:
    """Return a clean environment with the wheel. Its dependencies are those of this interpreter's environment."""
    folder = wheel.parent / "venv"
    run(sys.executable, "-m", "venv", "--without-pip", folder, cwd=wheel.parent)
    python = folder / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps", "--no-index", wheel]
    run(*pip, cwd=wheel.parent)
    # Python processes no .pth file of a folder that a .pth file names, so the editable install is not seen.
    packages = run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=wheel.parent).strip()
    Path(packages, "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n", encoding="utf-8")
    return folder


def test_wheel_has_every_tracked_file_of_the_package(wheel):
    tracked = subprocess.run(
        ["git", "ls-files", "burst_portable"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    assert wheel.name == f"burst_portable-{VERSION}-py3-none-any.whl"
    assert package_files(zipfile.ZipFile(wheel).namelist()) >= set(tracked)


def test_source_distribution_builds_the_same_wheel(wheel, tmp_path):
    archive = build("sdist", ROOT, tmp_path / "sdist")
    with tarfile.open(archive) as files:
        files.extractall(tmp_path, filter="data")
    again = build("wheel", tmp_path / f"burst_portable-{VERSION}", tmp_path / "wheel")
    assert package_files(zipfile.ZipFile(again).namelist()) == package_files(zipfile.ZipFile(wheel).namelist())


def test_installed_package_is_the_wheel(venv, tmp_path):
    code = "import burst_portable; print(burst_portable.__version__, burst_portable.__file__)"
    version, file = run(venv / "bin" / "python", "-c", code, cwd=tmp_path).split()
    assert version == VERSION
    assert Path(file).is_relative_to(venv)


def test_installed_command_prints_its_version(venv, tmp_path):
    assert run(venv / "bin" / "burst-portable", "--version", cwd=tmp_path).split()[-1] == VERSION


TRAIN = """
import os, sys
os.chdir(os.path.dirname(__file__))  # the ranks import from this folder first
import burst_portable
from burst_portable.cli import main

print(burst_portable.__file__)
sys.exit(main(["run", "--model", "tiny", "--ranks", "2", "--seq-len", "256", "--steps", "1", "--check"]))
"""


def test_installed_package_trains_on_two_ranks(venv, tmp_path, forked_python):
    """All processes are outside the repository, and import the package from the environment."""
    (tmp_path / "train.py").write_text(TRAIN, encoding="utf-8")
    packages = run(
        venv / "bin" / "python", "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=tmp_path
    )
    environment = {**os.environ, "PYTHONPATH": packages.strip()}
    done = run_program(tmp_path / "train.py", environment=environment, python=forked_python)
    assert done.returncode == 0, done.stdout + done.stderr
    assert Path(done.stdout.splitlines()[0]).is_relative_to(venv)
    assert "2 ranks" in done.stdout


@pytest.mark.full
def test_installed_command_trains_on_two_ranks(venv, tmp_path):
    """The same from a shell, with interpreters that import torch themselves."""
    command = ["run", "--model", "tiny", "--ranks", "2", "--seq-len", "256", "--steps", "1", "--check"]
    assert "2 ranks" in run(venv / "bin" / "burst-portable", *command, cwd=tmp_path)


# tests/meta/test_typed.py checks the files of the wheel, with torch.
@pytest.mark.full
def test_installed_package_has_types(venv, tmp_path):
    (tmp_path / "user.py").write_text(USER, encoding="utf-8")
    (tmp_path / "mypy.ini").write_text(MYPY, encoding="utf-8")
    python = venv / "bin" / "python"
    printed = run(sys.executable, "-m", "mypy", "--python-executable", python, "user.py", cwd=tmp_path)
    assert printed == "Success: no issues found in 1 source file\n"
