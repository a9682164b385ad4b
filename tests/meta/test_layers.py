"""Test the import contracts of pyproject.toml and the rules of ci/check_source.py, by planted violations."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import grimp
import pytest
from grimp import ImportGraph
from importlinter.application.use_cases import read_user_options
from importlinter.configuration import configure
from importlinter.contracts.acyclic_siblings import AcyclicSiblingsContract
from importlinter.contracts.forbidden import ForbiddenContract
from importlinter.contracts.layers import LayersContract
from importlinter.contracts.protected import ProtectedContract
from importlinter.domain.contract import Contract

ROOT = Path(__file__).resolve().parents[2]
configure()
OPTIONS = read_user_options(str(ROOT / "pyproject.toml"))
CONTRACTS: dict[str, type[Contract]] = {
    "acyclic_siblings": AcyclicSiblingsContract,
    "forbidden": ForbiddenContract,
    "layers": LayersContract,
    "protected": ProtectedContract,
}


def broken(graph: ImportGraph) -> set[str]:
    """Return the ids of the contracts that a graph breaks."""
    ids = set()
    for options in OPTIONS.contracts_options:
        contract = CONTRACTS[options["type"]](options["name"], OPTIONS.session_options, options)
        if not contract.check(graph, verbose=False).kept:
            ids.add(options["id"])
    return ids


@pytest.fixture(scope="module")
def graph() -> ImportGraph:
    return grimp.build_graph("burst_portable", include_external_packages=True, cache_dir=None)


# (importer, imported, contracts that break)
VIOLATIONS = (
    ("runtime.executor", "api", {"layers"}),
    ("mesh", "runtime.autograd", {"layers"}),
    ("numerics", "planning.plans", {"layers"}),
    ("planning.plans", "strategies.base", {"layers"}),
    ("comm.local", "planning.plans", {"layers"}),
    ("api", "profiling.session", {"layers"}),
    ("runtime.prepare", "profiling.session", {"layers"}),
    ("integrations.transformers.loss", "conformance.suite", {"layers"}),
    ("profiling.intervals", "profiling.analysis.analyze", {"acyclic"}),
    ("cli.output", "cli.plan_view", {"acyclic"}),
    ("mask", "torch", {"pure"}),
    ("strategies.ring", "torch", {"pure"}),
    ("config", "torch", {"pure"}),
    ("planning.plans", "numpy", {"pure"}),
    ("planning.tiles", "utils.torch_modes", {"pure"}),
    ("strategies.ring", "numerics", {"pure"}),
    ("backends.rocm.backend", "backends.cuda.backend", {"vendors", "entry_points"}),
    ("backends.selection", "backends.cuda.backend", {"vendors", "entry_points"}),
    ("backends.cuda.backend", "backends.selection", {"vendors"}),
    ("cli.doctor", "backends.cuda.backend", {"entry_points"}),
    ("backends.cuda.backend", "planning.plans", {"kernels"}),
    ("backends.cuda.backend", "strategies.base", {"kernels"}),
    ("kernels.base", "mask", {"kernels"}),
)


@pytest.mark.parametrize(("importer", "imported", "contracts"), VIOLATIONS)
def test_contracts_reject_planted_import(graph, importer, imported, contracts):
    importer = f"burst_portable.{importer}"
    imported = imported if imported in ("torch", "numpy") else f"burst_portable.{imported}"
    assert {importer, imported} <= graph.modules
    assert not graph.direct_import_exists(importer=importer, imported=imported)
    graph.add_import(importer=importer, imported=imported, line_number=1, line_contents="planted")
    try:
        found = broken(graph)
    finally:
        graph.remove_import(importer=importer, imported=imported)
    assert contracts <= found


def test_contracts_reject_module_without_layer(graph):
    for name, contract in (("burst_portable.helpers", "layers"), ("burst_portable.backends.intel", "vendors")):
        graph.add_module(name)
        try:
            assert broken(graph) == {contract}
        finally:
            graph.remove_module(name)


def test_layer_contracts_hold(graph):
    assert broken(graph) == set()


STATEMENT = "write an import statement"
CAPABILITY = "query a capability, not a vendor"
# name: (file, its source, the rule that it breaks in its last line)
SOURCES = {
    "literal import": ("api.py", "import importlib\nimportlib.import_module('burst_portable.cli')", STATEMENT),
    "device by name": ("api.py", "def f(x):\n    return x.device.type == 'npu'", CAPABILITY),
    "device with an index": ("comm/local.py", "def f(device):\n    return 'cuda:0' != device", CAPABILITY),
    "one of several": ("mesh.py", "def f(kind):\n    return kind in ('cuda', 'hip')", CAPABILITY),
    "starts with": ("backends/selection.py", "def f(kind):\n    return kind.startswith('cuda')", CAPABILITY),
    "match": ("cli/run.py", "def f(kind):\n    match kind:\n        case 'ascend': return 1", CAPABILITY),
    "flag": ("kernels/reference.py", "def f(x):\n    return x.is_cuda", CAPABILITY),
}
ALLOWED = {
    "backends/cuda/backend.py": "def f(x):\n    return x.is_cuda and x.device.type == 'cuda'",
    "cli/plan.py": "from importlib import import_module\nimport_module('torch')\nbackends = ('cpu', 'cuda')",
    "api.py": "def f(x, table):\n    return table[x.device.type] == 3 or x == 'gloo'",
}


def check_source(folder: Path, files: dict[str, str]) -> tuple[int, list[str]]:
    for name, source in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source)
    command = [sys.executable, ROOT / "ci" / "check_source.py", folder]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert not done.stderr, done.stderr
    return done.returncode, done.stdout.splitlines()


@pytest.mark.parametrize(("file", "source", "rule"), SOURCES.values(), ids=list(SOURCES))
def test_check_source_finds_violation(tmp_path, file, source, rule):
    code, lines = check_source(tmp_path, {file: source})
    assert (code, len(lines)) == (1, 2)
    assert lines[0].startswith(f"{tmp_path / file}:{len(source.splitlines())}: ")
    assert rule in lines[0]


def test_check_source_accepts_allowed_code(tmp_path):
    code, lines = check_source(tmp_path, ALLOWED)
    assert code == 0, lines


def test_check_source_accepts_the_package():
    code, lines = check_source(ROOT / "burst_portable", {})
    assert code == 0, lines


def test_contributing_lists_the_layers():
    page = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").partition("## Layers")[2].partition("\n## ")[0]
    rows = [set(re.findall("`([^`]+)`", line.split("|")[1])) for line in page.splitlines() if line.startswith("| `")]
    layers = [set(line.split(" | ")) for line in OPTIONS.contracts_options[0]["layers"]]
    assert rows == layers[1:]  # without `__main__`
