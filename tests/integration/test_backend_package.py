"""Test the example of a backend in a separate package: pip installs it, and the conformance suite accepts it."""

from __future__ import annotations

import json
import shlex
import shutil
from pathlib import Path

import pytest

from burst_portable.config import environment_of_children
from tests.support.fork_server import run_program
from tests.support.plugins import pip_install

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "backend_package"


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """Return the environment of a process in which the package is installed."""
    site = pip_install(EXAMPLE, tmp_path_factory.mktemp("example"))
    return environment_of_children(PYTHONPATH=f"{site}:{ROOT}", OMP_NUM_THREADS="1")


def run(environment, *arguments, **options):
    """Run a module outside the example's folder, so that Python finds the installed package."""
    return run_program(*arguments, environment=environment, **options)


# The tests of the package select further groups.
@pytest.mark.slow
@pytest.mark.parametrize("groups", ["claims,attention", pytest.param("kernels", marks=pytest.mark.full)])
def test_conform_finds_backend_package(groups, environment, tmp_path, forked_python):
    report = tmp_path / "report.json"
    options = ["--backend", "theirs", "--quick", "--ranks", "2", "--only", groups, "--json", str(report)]
    done = run(environment, "burst_portable", "conform", *options, python=forked_python)
    assert done.returncode == 0, done.stdout + done.stderr
    facts = json.loads(report.read_text())
    assert facts["ok"]
    assert facts["backend"] == "theirs"
    assert facts["kernels"] == ["their_boxes", "reference"]
    assert facts["device"]["from"] == "their_attention:backend"


def test_doctor_finds_backend_package(environment):
    doctor = json.loads(run(environment, "burst_portable", "doctor", "--json").stdout)
    assert doctor["backends"]["theirs"]["ok"]
    assert doctor["backends"]["theirs"]["entry_point"] == "their_attention:backend"


@pytest.mark.slow
def test_run_uses_named_backend(environment, forked_python):
    """The backend cpu serves the same device, comes first and has no such kernel."""
    options = ["--backend", "theirs", "--ranks", "2", "--steps", "1", "--seq-len", "64", "--json", "-"]
    chosen = {**environment, "BURST_KERNEL": "their_boxes"}
    done = run(chosen, "burst_portable", "run", *options, python=forked_python)
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads(done.stdout)["backend"] == "theirs"


@pytest.mark.slow
def test_backend_package_passes_its_own_tests(environment):
    options = ["-q", "-p", "no:cacheprovider", "-k", "transport or fully_masked", str(EXAMPLE / "tests")]
    done = run(environment, "pytest", "--rootdir", str(EXAMPLE), "-c", "/dev/null", *options)
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout


OWN_TRANSPORT = """
from burst_portable.conformance import check_backend
from their_attention import TheirBackend
from their_attention.transport import TheirTransport


class OwnTransport(TheirBackend):
    def transport(self, group, timeout):
        return TheirTransport(group, timeout)


if __name__ == "__main__":
    report = check_backend(OwnTransport(), cases=["group:messages-2ranks-of-3"])
    print(report.counts(), [failure.message for failure in report.failures])
"""


@pytest.mark.slow
def test_transport_example_passes(environment, tmp_path, forked_python):
    """The page shows the class, and `group` accepts it."""
    page = (ROOT / "docs" / "writing_a_backend.md").read_text(encoding="utf-8")
    example = (EXAMPLE / "their_attention" / "transport.py").read_text(encoding="utf-8")
    assert example[example.index("class TheirTransport") : example.index("class TheirHandle")].strip() in page
    (tmp_path / "own.py").write_text(OWN_TRANSPORT)
    changed = {**environment, "PYTHONPATH": f"{tmp_path}:{environment['PYTHONPATH']}"}
    done = run(changed, "own", python=forked_python)
    assert done.stdout == "{'passed': 1, 'failed': 0, 'skipped': 0} []\n", done.stdout + done.stderr


@pytest.mark.slow
def test_report_commands_reproduce_failures(environment, tmp_path):
    """Each printed command runs in its own process, with a bug in the installed package."""
    site = Path(environment["PYTHONPATH"].partition(":")[0])
    broken = shutil.copytree(site, tmp_path / "site")
    kernel = broken / "their_attention" / "kernel.py"
    kernel.write_text(kernel.read_text().replace("call.scale", "(1.01 * call.scale)"))
    changed = {**environment, "PYTHONPATH": f"{broken}:{ROOT}"}
    options = ["--backend", "theirs", "--quick", "--ranks", "2", "--only", "claims,attention"]
    first = run(changed, "burst_portable", "conform", *options, "--json", "-")
    assert first.returncode == 1, first.stderr
    failures = {r["check"]: r for r in json.loads(first.stdout)["results"] if not r["ok"]}
    assert set(failures) == {"claims", "attention"}
    commands = [shlex.split(failure["command"]) for failure in failures.values()]
    assert {program for program, *_ in commands} == {"burst-portable"}
    for failure, (_, *arguments) in zip(failures.values(), commands, strict=True):
        done = run(changed, "burst_portable", *arguments, "--json", "-")
        assert done.returncode == 1, done.stderr
        (result,) = json.loads(done.stdout)["results"]
        assert f"{result['check']}:{result['name']}" == failure["smallest"]
        assert not result["ok"]
