"""Check with strict mypy what users and implementers write, over the package as a wheel installs it.

`assert_type` fails if a call is typed `Any` or `object`, or not at all. An unneeded `# type: ignore` fails too, so
misspelled names must be errors.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

import burst_portable
from burst_portable import conformance

ROOT = Path(__file__).resolve().parents[2]
PAGES = {"readme": ROOT / "README.md", "quickstart": ROOT / "docs" / "quickstart.md"}

# The part of a strict user's settings that torch needs: it has functions without types, and names that it imports and
# does not export. The compiler's own modules, others that no annotation of the package names, and transformers stay
# unread, which is three quarters of the time.
SETTINGS = """
[mypy]
strict = True
untyped_calls_exclude = torch
[mypy-torch.distributed.*]
implicit_reexport = True
[mypy-torch._dynamo.*,torch._inductor.*,torch._functorch.*,torch._subclasses.*,torch.fx.*,torch.export.*]
follow_imports = skip
[mypy-torch._decomp.*,torch._refs.*,torch._meta_registrations.*,torch._higher_order_ops.*,torch.onnx.*,torch.jit.*]
follow_imports = skip
[mypy-torch.ao.*,torch.distributions.*,transformers.*]
follow_imports = skip
"""

BEFORE_THE_PAGE = {"readme": "import torch\nbatches: list[torch.Tensor] = []\n", "quickstart": ""}
AFTER_THE_PAGE = {
    "readme": """
from typing import assert_type
assert_type(mesh, Mesh)
assert_type(q, torch.Tensor)
assert_type(out, torch.Tensor)
assert_type(bp.Mask.causal(), bp.Mask)
""",
    "quickstart": """
from typing import assert_type
assert_type(work(bp.Mesh.single()), list[torch.Tensor])
assert_type(bp.run_threads(3, work), list[list[torch.Tensor]])
""",
}

CALLS = """
from typing import assert_type
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from transformers import PreTrainedModel
import burst_portable as bp
import burst_portable.conformance as conformance
from burst_portable.runtime.explanation import Explanation
from burst_portable.integrations.transformers import ShardedModel, parallelize
from burst_portable.layout import Layout
from burst_portable.planning.plans import Plan
from burst_portable.profiling.report import Report
from burst_portable.profiling.session import Session

def calls(x: Tensor, with_lse: bool, model: PreTrainedModel) -> None:
    mesh = bp.Mesh.from_group()
    assert_type(mesh, bp.Mesh)
    assert_type(bp.Mask.causal(), bp.Mask)
    assert_type(bp.shard(x, mesh), Tensor)
    assert_type(bp.shard(x, init_device_mesh("cpu", (2,), mesh_dim_names=("rows",))["rows"]), Tensor)
    assert_type(bp.shard(x, dist.group.WORLD), Tensor)
    assert_type(bp.shard_batch(x, mesh=mesh), dict[str, Tensor])
    assert_type(bp.unshard(x, mesh, seq_len=8), Tensor)
    assert_type(bp.attention(x, x, x, mesh=mesh), Tensor)
    assert_type(bp.attention(x, x, x, return_lse=True), tuple[Tensor, Tensor])
    assert_type(bp.attention(x, x, x, return_lse=with_lse), Tensor | tuple[Tensor, Tensor])
    assert_type(bp.plan(seq_len=8, ranks=2, heads=2), Plan)
    assert_type(bp.plan(seq_len=8, ranks=2, heads=2).layout, Layout)
    assert_type(bp.explain(x, x, x, mesh=mesh), Explanation)
    with bp.profile(mesh=mesh) as session:
        assert_type(session, Session)
    assert_type(session.report(), Report | None)
    module = bp.nn.SelfAttention(64, 4, mesh=mesh)
    assert_type(module, bp.nn.SelfAttention)
    assert_type(module(x, seq_len=8), Tensor)
    assert_type(bp.nn.apply_rotary_embedding(x, x), Tensor)
    with parallelize(model, mesh) as sharded:
        assert_type(sharded, ShardedModel)
    assert_type(conformance.check_backend("cpu"), conformance.Report)
    bp.atention  # type: ignore[attr-defined]
    conformance.chek_backend  # type: ignore[attr-defined]
    module(rows=x)  # type: ignore[call-arg]
    bp.shard(x, "rows")  # type: ignore[arg-type]
    bp.attention(x, x, x, mesh="rows")  # type: ignore[call-overload]
"""


UNFINISHED = """
from collections.abc import Sequence
from typing import Any
from burst_portable.backends.base import AcceleratorBackend, Backend, Capabilities, HardwareSpec
from burst_portable.comm.base import Handle, Message, Transport

class Lacking(Backend):
    name = "lacking"

class Mistaken(Backend):
    name = "mistaken"
    capabilities = Capabilities("cpu", "gloo", False, HardwareSpec(tflops=1.0, intra_node_bandwidth=1.0))

    def probe(self) -> bool:
        return True

    def kernels(self) -> str:
        return "triton"

    def peaks(self) -> float:
        return 1e12

class Chip(AcceleratorBackend):
    name = "chip"
    capabilities = Mistaken.capabilities

    def unavailable_reason(self) -> str:
        return ""

class Silent(Transport):
    direct = True

class Unlabeled(Transport):
    host = "yes"

    def post(self, sends: Sequence[Message], receives: Sequence[Message]) -> tuple[list[Handle], list[Handle]]:
        return [], []

Lacking()
Chip()
Silent("silent", 0, 1)
Unlabeled("unlabeled")
"""
OWED = {
    "Lacking": 'abstract class "Lacking" with abstract attributes "capabilities", "kernels" and "probe"',
    "probe": 'Return type "bool" of "probe" incompatible with return type "Probe" in supertype',
    "kernels": 'Return type "str" of "kernels" incompatible with return type',
    "peaks": 'Signature of "peaks" incompatible with supertype',
    "Chip": 'abstract class "Chip" with abstract attributes "describe", "libraries" and "make_kernels"',
    "Silent": 'abstract class "Silent" with abstract attribute "post"',
    "host": '(expression has type "str", base class "Transport" defined the type as "bool")',
    "post": 'Signature of "post" incompatible with supertype',
    "Unlabeled": 'Missing positional arguments "rank", "size" in call to "Unlabeled"',
}
"""A part of what mypy prints for each mistake above."""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
    return next(folder.glob("*.whl"))


def code_of(page: Path) -> str:
    source = page.read_text(encoding="utf-8")
    return "\n".join(re.findall(r"^```python\n(.*?)^```$", source, re.MULTILINE | re.DOTALL))


def every_name() -> str:
    """Return a line for each public name. A name that only `__getattr__` resolves is an error."""
    lines = [f"bp.{name}" for name in burst_portable.__all__] + [f"conformance.{name}" for name in conformance.__all__]
    return "\n".join(["import burst_portable as bp", "import burst_portable.conformance as conformance", *lines])


@pytest.fixture(scope="module")
def installed(wheel) -> Path:
    """Return a folder with the installed package; type checks keep their cache in it."""
    folder = wheel.parent / "installed"
    shutil.unpack_archive(wheel, folder, "zip")
    return folder


def type_checked(folder: Path, installed: Path, programs: dict[str, str]) -> str:
    """Return what mypy prints of a user's programs, where `installed` is all there is of the package."""
    for name, text in programs.items():
        (folder / f"{name}.py").write_text(text + "\n", encoding="utf-8")
    settings = folder / "mypy.ini"
    settings.write_text(SETTINGS, encoding="utf-8")
    # -S: the environment's own packages without its .pth files, one of which leads to this repository.
    command = [sys.executable, "-S", "-m", "mypy", "--config-file", str(settings)]
    paths = os.pathsep.join((str(installed), sysconfig.get_path("purelib")))
    done = subprocess.run(
        [*command, "--cache-dir", str(installed.parent / "cache"), *(f"{name}.py" for name in programs)],
        cwd=folder, env={**os.environ, "PYTHONPATH": paths}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    return done.stdout + done.stderr


@pytest.mark.slow
def test_user_code_type_checks(installed, tmp_path):
    programs = {name: code_of(page) for name, page in PAGES.items()}
    assert all("bp." in text or "burst_portable." in text for text in programs.values())
    programs = {name: BEFORE_THE_PAGE[name] + text + AFTER_THE_PAGE[name] for name, text in programs.items()}
    programs |= {"calls": CALLS, "every_name": every_name()}
    told = type_checked(tmp_path, installed, programs)
    assert told == "Success: no issues found in 4 source files\n", told


@pytest.mark.slow
def test_typed_contracts_require_missing_members(installed, tmp_path):
    printed = type_checked(tmp_path, installed, {"unfinished": UNFINISHED})
    errors = [line for line in printed.splitlines() if ": error: " in line]
    missing = [name for name, part in OWED.items() if not any(part in line for line in errors)]
    assert not missing, printed
    assert len(errors) == len(OWED), printed


@pytest.mark.slow
def test_typed_example_of_a_backend_passes(installed, tmp_path):
    folder = ROOT / "examples" / "backend_package" / "their_attention"
    (tmp_path / folder.name).mkdir()
    programs = {f"{folder.name}/{path.stem}": path.read_text(encoding="utf-8") for path in folder.glob("*.py")}
    printed = type_checked(tmp_path, installed, programs)
    assert printed == f"Success: no issues found in {len(programs)} source files\n", printed


def test_package_without_py_typed_has_no_types(wheel, tmp_path):
    """The negative control of the tests above."""
    shutil.unpack_archive(wheel, tmp_path / "installed", "zip")
    (tmp_path / "installed/burst_portable/py.typed").unlink()
    told = type_checked(tmp_path, tmp_path / "installed", {"user": "import burst_portable"})
    assert "missing library stubs or py.typed marker" in told, told
