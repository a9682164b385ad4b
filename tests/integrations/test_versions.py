from __future__ import annotations

import ast
import importlib
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

from burst_portable import Mesh
from burst_portable.errors import PackageMissingError, UnsupportedError
from burst_portable.integrations.accelerate import SequenceParallelism
from burst_portable.integrations.transformers import parallelize
from burst_portable.integrations.versions import check_version, importing
from tests.support.fork_server import run_program
from tests.support.models import make

ROOT = Path(__file__).parents[2]


def test_check_version_compares_numbers():
    check_version("torch", "2.9", "99")  # "2.13" is later than "2.9"
    with pytest.raises(UnsupportedError, match=r"version of torch; got 2\..*; allowed: >=1\.9,<2\.4; pip install \"to"):
        check_version("torch", "1.9", "2.4")
    with pytest.raises(UnsupportedError, match=r"got no such package.*pip install \"burst-portable\[lightning\]\""):
        check_version("lightning-of-nobody", "2.6", "3", extra="lightning")


@pytest.mark.parametrize(
    ("package", "call", "allowed"),
    [
        ("transformers", lambda: parallelize(make("llama"), Mesh.single()), ">=5.6,<6"),
        ("accelerate", SequenceParallelism, ">=1.12,<2"),
    ],
)
@pytest.mark.parametrize("found", ["0.9", "5.5.4", "99"])
def test_other_version_is_rejected_before_use(
    package: str, call: Callable[[], object], allowed: str, found: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    folder = tmp_path / f"{package}-{found}.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: {found}\n")
    monkeypatch.syspath_prepend(tmp_path)
    told = f"unsupported version of {package}; got {found}; allowed: {allowed}; .*{r'burst-portable.transformers.'}"
    with pytest.raises(UnsupportedError, match=told):
        call()


def test_checked_versions_are_those_of_the_extras() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    checked = set()
    for path in (ROOT / "burst_portable" / "integrations").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "check_version":
                package, first, end = (argument.value for argument in node.args if isinstance(argument, ast.Constant))
                extra = next((word.value.value for word in node.keywords if isinstance(word.value, ast.Constant)), None)
                checked.add(package)
                if extra is not None:
                    assert f"{package}>={first},<{end}" in extras[extra], path
    assert {"transformers", "accelerate", "lightning", "torchtitan"} <= checked


INSTALLS = {
    "transformers": ("transformers", "burst-portable[transformers]"),
    "accelerate": ("accelerate", "burst-portable[transformers]"),
    "trainer": ("accelerate", "burst-portable[transformers]"),
    "trl": ("trl", "burst-portable[trl]"),
    "lightning": ("lightning", "burst-portable[lightning]"),
    "torchtitan": ("torchtitan", "burst-portable[torchtitan]"),
    "deepspeed": ("deepspeed", "deepspeed>=0.19,<0.20"),
    "megatron": ("megatron", "megatron-core>=0.16,<0.20"),
    "axolotl": ("axolotl", "axolotl>=0.19,<0.22"),
}
"""The package that each integration needs, and what to install."""


@pytest.mark.slow
def test_import_without_its_package_names_what_to_install() -> None:
    given = [f"{module}:{package}" for module, (package, _) in INSTALLS.items()]
    done = run_program("tests.support.import_without", *given)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    for line, (package, install) in zip(lines, INSTALLS.values(), strict=True):
        assert line.startswith(f"PackageMissingError {package} is not installed, and this integration needs it; got ")
        assert line.endswith(f'; pip install "{install}"')


def test_other_missing_modules_keep_their_error() -> None:
    with pytest.raises(ModuleNotFoundError, match="of_nobody") as caught, importing("lightning", "lightning"):
        importlib.import_module("of_nobody")
    assert not isinstance(caught.value, PackageMissingError)
