"""What a user's type checker sees of the package as a wheel installs it: mypy, strict, over the pages' examples.

`assert_type` fails where a call is typed `Any` or `object`, or not at all; a line `# type: ignore` that is needed no
more fails too, so misspelt names must be errors.
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
PAGES = {"readme": ROOT / "README.md", "first_steps": ROOT / "docs" / "first_steps.md"}

# The part of a strict user's settings that torch needs: it has functions without types, and names that it imports and
# does not export. The compiler's own modules and transformers stay unread, which is two thirds of the time.
SETTINGS = """
[mypy]
strict = True
untyped_calls_exclude = torch
[mypy-torch.distributed.*]
implicit_reexport = True
[mypy-torch._dynamo.*,torch._inductor.*,transformers.*]
follow_imports = skip
"""

AFTER_THE_PAGE = {
    "readme": """
from typing import assert_type
assert_type(mesh, Mesh)
assert_type(q, torch.Tensor)
assert_type(out, torch.Tensor)
assert_type(Mask.causal(), Mask)
""",
    "first_steps": """
from typing import assert_type
assert_type(work(bp.Mesh.single()), list[torch.Tensor])
assert_type(bp.run_local(3, work), list[list[torch.Tensor]])
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
from burst_portable.integrations.transformers import Parallel, parallelize
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
    assert_type(bp.nn.rotate(x, x), Tensor)
    with parallelize(model, mesh) as handle:
        assert_type(handle, Parallel)
    assert_type(conformance.check_backend("cpu"), conformance.Report)
    bp.atention  # type: ignore[attr-defined]
    conformance.chek_backend  # type: ignore[attr-defined]
    module(rows=x)  # type: ignore[call-arg]
    bp.shard(x, "rows")  # type: ignore[arg-type]
    bp.attention(x, x, x, mesh="rows")  # type: ignore[call-overload]
"""


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
    """A line for each public name: one that only `__getattr__` knows is an error."""
    lines = [f"bp.{name}" for name in burst_portable.__all__] + [f"conformance.{name}" for name in conformance.__all__]
    return "\n".join(["import burst_portable as bp", "import burst_portable.conformance as conformance", *lines])


def type_checked(folder: Path, installed: Path, programs: dict[str, str]) -> str:
    """What mypy says of a user's programs, where `installed` is all there is of the package."""
    for name, text in programs.items():
        (folder / f"{name}.py").write_text(text + "\n", encoding="utf-8")
    settings = folder / "mypy.ini"
    settings.write_text(SETTINGS, encoding="utf-8")
    # -S: the environment's own packages without its .pth files, one of which leads to this repository.
    command = [sys.executable, "-S", "-m", "mypy", "--config-file", str(settings)]
    paths = os.pathsep.join((str(installed), sysconfig.get_path("purelib")))
    done = subprocess.run(
        [*command, "--cache-dir", str(folder / "cache"), *(f"{name}.py" for name in programs)],
        cwd=folder, env={**os.environ, "PYTHONPATH": paths}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    return done.stdout + done.stderr


@pytest.mark.slow
def test_what_users_write_is_typed(wheel, tmp_path):
    shutil.unpack_archive(wheel, tmp_path / "installed", "zip")
    programs = {name: code_of(page) for name, page in PAGES.items()}
    assert all("bp." in text or "burst_portable." in text for text in programs.values())
    programs = {name: text + AFTER_THE_PAGE[name] for name, text in programs.items()}
    programs |= {"calls": CALLS, "every_name": every_name()}
    (tmp_path / "user").mkdir()
    told = type_checked(tmp_path / "user", tmp_path / "installed", programs)
    assert told == "Success: no issues found in 4 source files\n", told


def test_without_the_marker_a_checker_sees_nothing(wheel, tmp_path):
    """The bug that the test above is there for: mypy reads no types of a package that does not say it has some."""
    shutil.unpack_archive(wheel, tmp_path / "installed", "zip")
    (tmp_path / "installed/burst_portable/py.typed").unlink()
    told = type_checked(tmp_path, tmp_path / "installed", {"user": "import burst_portable"})
    assert "missing library stubs or py.typed marker" in told, told
