"""The layer check finds what it is there to find, and the real tree holds."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from ci.check_layers import LAYERS

ROOT = Path(__file__).resolve().parents[2]
CHECKER = ROOT / "ci" / "check_layers.py"


def run_checker(*arguments: Path) -> tuple[int, list[str]]:
    done = subprocess.run([sys.executable, CHECKER, *arguments], capture_output=True, text=True, check=False)
    assert not done.stderr, done.stderr
    return done.returncode, done.stdout.splitlines()


def plant(folder: Path, files: dict[str, str]) -> Path:
    package = folder / "burst_portable"
    for name, source in {"__init__.py": "", **files}.items():
        path = package / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source)
    return package


HIGHER = "lower never imports higher"
PURE = "planning is pure"
VENDOR = "a vendor imports only"
LOADED = "a vendor is loaded by its entry point"
ENVIRONMENT = "environment variables are read in config.py alone"
CAPABILITY = "ask a capability, not a vendor"

# name: (file, its source, the rule that it breaks). The last line
# of the source is the one to be named; the other side of each import is planted too.
VIOLATIONS = {
    "lower imports higher": ("runtime/executor.py", "from burst_portable.api import attention", HIGHER),
    "a contract sees backends": ("kernels/base.py", "from burst_portable.backends import registry", HIGHER),
    "several names": ("mesh.py", "from burst_portable.api import attention, merge", HIGHER),
    "relative": ("kernels/base.py", "from ..mesh import Mesh", HIGHER),
    "relative to a package": ("comm/__init__.py", "from ..runtime import autograd", HIGHER),
    "inside a function": ("runtime/prepare.py", "def f():\n    import burst_portable.api", HIGHER),
    "by a literal name": (
        "numerics.py",
        "import importlib\nimportlib.import_module('burst_portable.planning.plans')",
        HIGHER,
    ),
    "for types only": (
        "mesh.py",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from burst_portable.runtime import autograd",
        HIGHER,
    ),
    "mask sees torch": ("mask.py", "import torch.nn.functional as F", PURE),
    "layout sees torch": ("layout.py", "def f():\n    from torch import Tensor", PURE),
    "plans sees numpy": ("planning/plans.py", "import numpy", PURE),
    "config sees torch": ("config.py", "import torch", PURE),
    "tiles sees numerics": ("planning/tiles.py", "from burst_portable.numerics import merge", PURE),
    "routes sees mesh": ("planning/routes.py", "from burst_portable.mesh import Mesh", PURE),
    "plans sees runtime": ("planning/plans.py", "from burst_portable import runtime", PURE),
    "strategy sees comm": ("strategies/ring.py", "from burst_portable.comm import base", PURE),
    "strategy sees torch": ("strategies/ring.py", "import torch", PURE),
    "plans sees strategies": ("planning/plans.py", "from burst_portable.strategies import base", HIGHER),
    "api sees the profiler": ("api.py", "import burst_portable.profiling.session", "nothing of the profiler"),
    "runtime sees the profiler": ("runtime/prepare.py", "from ..profiling import session", "nothing of the profiler"),
    "vendor sees plans": ("backends/cuda/backend.py", "from burst_portable.planning import plans", VENDOR),
    "vendor sees registry": ("backends/cuda/__init__.py", "from .. import registry", VENDOR),
    "vendor sees a vendor": ("backends/rocm/__init__.py", "from burst_portable.backends import cuda", LOADED),
    "registry sees a vendor": (
        "backends/registry.py",
        "from burst_portable.backends.cuda import backend",
        LOADED,
    ),
    "cli sees a vendor": ("cli/doctor.py", "import burst_portable.backends.cuda.backend", LOADED),
    "os.environ": ("comm/torch_dist.py", "import os\nrank = os.environ['RANK']", ENVIRONMENT),
    "os.getenv, renamed": ("cli/run.py", "import os as o\nrank = o.getenv('RANK')", ENVIRONMENT),
    "from os": ("api.py", "from os import environ", ENVIRONMENT),
    "device by name": ("api.py", "def f(x):\n    return x.device.type == 'npu'", CAPABILITY),
    "device with an index": ("comm/local.py", "def f(device):\n    return 'cuda:0' != device", CAPABILITY),
    "one of several": ("mesh.py", "def f(kind):\n    return kind in ('cuda', 'hip')", CAPABILITY),
    "starts with": ("cli/run.py", "def f(kind):\n    return kind.startswith('cuda')", CAPABILITY),
    "match": (
        "cli/run.py",
        "def f(kind):\n    match kind:\n        case 'ascend': return 1",
        CAPABILITY,
    ),
    "flag": ("kernels/reference.py", "def f(x):\n    return x.is_cuda", CAPABILITY),
    "no layer": ("helpers.py", "", "every module stands in LAYERS"),
}
OTHER_SIDES = (
    *("api", "mesh", "planning/__init__", "planning/plans", "numerics", "runtime/__init__", "runtime/autograd"),
    *("profiling/__init__", "profiling/session"),
    *("comm/base", "comm/local", "strategies/__init__", "strategies/base"),
    *("backends/__init__", "backends/registry", "backends/cuda/__init__", "backends/cuda/backend"),
)


@pytest.mark.parametrize(("file", "source", "rule"), VIOLATIONS.values(), ids=list(VIOLATIONS))
def test_a_planted_violation_is_found(tmp_path, file, source, rule):
    package = plant(tmp_path, {f"{name}.py": "" for name in OTHER_SIDES} | {file: source})
    code, lines = run_checker(package)
    assert code == 1
    assert lines[-1] == "check_layers: 1 violation in burst_portable"
    line = max(1, len(source.splitlines()))
    assert lines[0].startswith(f"{package / file}:{line}: burst_portable")
    assert rule in lines[0]


def test_what_is_allowed_passes(tmp_path):
    allowed = {
        "errors.py": "import difflib",
        "config.py": "import os\nlevel = os.environ.get('BURST_LEVEL')",
        "mask.py": "from burst_portable.errors import MaskError",
        "layout.py": "from .mask import Mask",
        "planning/plans.py": "from burst_portable import config\nfrom burst_portable.planning import routes, tiles",
        "planning/tiles.py": "",
        "planning/routes.py": "",
        "numerics.py": "import torch",
        "kernels/base.py": "import torch\nfrom burst_portable.planning.tiles import Tile",
        "comm/base.py": "",
        "backends/base.py": "from burst_portable.comm.base import Transport\nfrom ..kernels import base",
        "backends/cuda/__init__.py": "import torch\nfrom . import tuning\nhip = 'cuda' == tuning",
        "backends/cuda/tuning.py": "from burst_portable import errors, numerics",
        "cli/plan.py": "from burst_portable import __version__, api\nbackends = ('cpu', 'cuda')",
        "cli/plan_facts.py": "from burst_portable.planning import plans",
        "__main__.py": "from burst_portable.cli import plan",
        "api.py": "def f(x, table):\n    return table[x.device.type] == 3 or x == 'gloo'",
    }
    assert run_checker(plant(tmp_path, allowed)) == (0, ["check_layers: 0 violations in burst_portable"])


def test_the_real_tree_holds():
    code, lines = run_checker()
    assert code == 0, "\n".join(lines)


def test_the_table_for_contributors_is_the_checkers():
    """From high to low, but for the names of the package itself."""
    page = (
        (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").partition("## Layers")[2].partition("\n\nA vendor's")[0]
    )
    cells = [line.split("|")[1] for line in page.splitlines() if line.startswith("| `")]
    told = [set(re.findall("`([^`]+)`", part)) for cell in cells for part in cell.split(", then")]
    assert told[::-1] == [set(names) - {"", "__main__"} for names in LAYERS]
