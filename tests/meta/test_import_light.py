"""Check that `import burst_portable` imports little, and that a plan needs no torch."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

HEAVY = (
    "torch",
    "numpy",
    "triton",
    "transformers",
    "rich",
    "typer",
    "jinja2",
    "torch_npu",
    "pynvml",
    "amdsmi",
)


def run_python(source: str) -> str:
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_import_loads_nothing_heavy():
    loaded = json.loads(run_python("import burst_portable, json, sys; print(json.dumps(sorted(sys.modules)))"))
    assert "burst_portable" in loaded
    assert not set(HEAVY) & set(loaded)


@pytest.mark.parametrize(
    "module",
    [
        "mask",
        "layout",
        "planning.tiles",
        "planning.routes",
        "planning.schedule",
        "planning.plans",
        "planning.messages",
        "planning.work",
        "planning.predicted_time",
        "planning.cost",
        "planning.hardware",
        "planning.verify",
        "strategies.base",
        "strategies.planner",
    ],
)
def test_planning_needs_no_torch(module):
    # None in sys.modules makes an import of that name fail, also one of a submodule.
    run_python(f"import sys\nsys.modules.update(dict.fromkeys({HEAVY}))\nimport burst_portable.{module}\n")
