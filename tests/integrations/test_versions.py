from __future__ import annotations

import importlib

import pytest

from burst_portable.errors import PackageMissingError, UnsupportedError
from burst_portable.integrations.versions import check_version, importing
from tests.support.fork_server import run_program


def test_check_version_compares_numbers():
    check_version("torch", "2.9", "99")  # "2.13" is later than "2.9"
    with pytest.raises(UnsupportedError, match=r"version of torch; got 2\..*; allowed: >=1\.9,<2\.4; pip install \"to"):
        check_version("torch", "1.9", "2.4")
    with pytest.raises(UnsupportedError, match=r"got no such package.*pip install \"burst-portable\[lightning\]\""):
        check_version("lightning-of-nobody", "2.6", "3", extra="lightning")


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
