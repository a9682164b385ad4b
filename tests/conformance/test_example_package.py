"""The example of a backend in a package of its own: installed as pip installs it, and examined, with no change here."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from burst_portable.config import environment_of_children

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "backend_package"


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """Variables of a process that has the package installed."""
    site = tmp_path_factory.mktemp("site")
    source = tmp_path_factory.mktemp("source") / "package"
    source.mkdir()
    for file in (f for f in EXAMPLE.rglob("*") if f.is_file() and f.suffix in (".py", ".toml")):
        (source / file.relative_to(EXAMPLE)).parent.mkdir(parents=True, exist_ok=True)
        (source / file.relative_to(EXAMPLE)).write_bytes(file.read_bytes())
    offline = ["--no-deps", "--no-build-isolation", "--no-index", "--disable-pip-version-check", "--quiet"]
    pip = [sys.executable, "-m", "pip", "install", *offline, "--target", str(site), str(source)]
    done = subprocess.run(pip, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return environment_of_children(PYTHONPATH=f"{site}:{ROOT}")


def run(environment, *arguments):
    command = [sys.executable, "-m", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment, cwd=EXAMPLE)


@pytest.mark.slow
def test_conform_finds_it(environment, tmp_path):
    report = tmp_path / "report.json"
    groups = "claims,kernels,transport,attention,blind"
    options = ["--backend", "theirs", "--quick", "--ranks", "3", "--only", groups, "--json", str(report)]
    done = run(environment, "burst_portable", "conform", *options)
    assert done.returncode == 0, done.stdout + done.stderr
    facts = json.loads(report.read_text())
    assert facts["ok"]
    assert facts["backend"] == "theirs"
    assert facts["kernels"] == ["their_boxes", "reference"]
    assert facts["device"]["from"] == "their_attention:backend"


def test_the_doctor_finds_it(environment):
    doctor = json.loads(run(environment, "burst_portable", "doctor", "--json").stdout)
    assert doctor["backends"]["theirs"]["ok"]
    assert doctor["backends"]["theirs"]["from"] == "their_attention:backend"


@pytest.mark.slow
def test_its_own_tests_are_one_decorator(environment):
    options = ["-q", "-p", "no:cacheprovider", "-k", "transport or blind", "tests"]
    done = run(environment, "pytest", "--rootdir", str(EXAMPLE), "-c", "/dev/null", *options)
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout
