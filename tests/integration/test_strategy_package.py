"""Test the example of a strategy in a separate package: pip installs it, and no other line changes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from burst_portable.config import environment_of_children
from tests.support.fork_server import run_program
from tests.support.plugins import pip_install

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "strategy_package"
CALL = ("--seq-len", "4096", "--ranks", "4", "--heads", "8")


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """Return the environment of a process in which the package is installed."""
    site = pip_install(EXAMPLE, tmp_path_factory.mktemp("example"))
    return environment_of_children(PYTHONPATH=f"{site}:{ROOT}", OMP_NUM_THREADS="1")


def run(environment, *arguments):
    """Run a module from the repository's folder, so that the installed package is found and not the example's."""
    return run_program(*arguments, environment=environment)


def test_plan_lists_and_plans_the_strategy(environment):
    shown = run(environment, "burst_portable", "plan", "--help").stdout
    assert "broadcast" in shown
    planned = run(environment, "burst_portable", "plan", *CALL, "--strategy", "broadcast", "--json")
    facts = json.loads(planned.stdout)
    assert facts["strategy"] == "broadcast"
    assert facts["check"]["ok"]
    assert facts["passes"]["backward"]["transfer"] == "broadcast"
    every = json.loads(run(environment, "burst_portable", "plan", *CALL, "--strategy", "all", "--json").stdout)
    assert "broadcast" in {one["label"] for one in every["strategies"]}


@pytest.mark.slow
def test_auto_explain_and_profile_know_the_strategy(environment):
    done = run(environment, "tests.support.installed_strategy")
    assert done.returncode == 0, done.stderr
    facts = json.loads(done.stdout)
    assert "broadcast " in facts["reason"]
    assert "broadcast" in facts["explained"]
    assert set(facts["profiled"]) == {"broadcast"}
    assert facts["wrong"] == []


@pytest.mark.slow
def test_conform_tests_the_strategy(environment, tmp_path):
    report = tmp_path / "report.json"
    options = ["--backend", "cpu", "--strategy", "broadcast", "--quick", "--ranks", "4", "--json", str(report)]
    done = run(environment, "burst_portable", "conform", *options)
    assert done.returncode == 0, done.stdout + done.stderr
    facts = json.loads(report.read_text())
    assert facts["ok"]
    assert (facts["strategy"], facts["only"]) == ("broadcast", [])
    assert {result["check"] for result in facts["results"]} == {"attention", "fully_masked"}
    assert all("strategy=broadcast" in result["name"] for result in facts["results"])


@pytest.mark.slow
def test_strategy_package_passes_its_own_tests(environment):
    options = ["-q", "-p", "no:cacheprovider", "--rootdir", str(EXAMPLE), "-c", "/dev/null", str(EXAMPLE / "tests")]
    done = run(environment, "pytest", *options)
    assert done.returncode == 0, done.stdout + done.stderr
