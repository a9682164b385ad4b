"""Test backends of third-party packages: they are found, and each kind of fault is reported."""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path

import pytest
import torch

import burst_portable
from burst_portable.backends import selection
from burst_portable.backends.base import package_error
from burst_portable.cli import doctor
from burst_portable.cli.backend_choice import choose_backend
from burst_portable.conformance import check_backend
from burst_portable.errors import BackendUnavailableError, InputError
from burst_portable.kernels.base import LazyKernel
from tests.support.calls import kernel_call


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """Return a function that puts a package with an entry point on the path, and returns the backend's name."""
    monkeypatch.syspath_prepend(str(tmp_path))
    caches = selection.load, selection.for_device
    for cache in caches:
        cache.cache_clear()

    def install(source: str, name: str = "theirs", target: str = "their_backend:backend", package: str = "") -> str:
        if source or not package:
            (tmp_path / "their_backend.py").write_text(source)
        package = package or f"{name}_package"
        info = tmp_path / f"{package}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[{selection.GROUP}]\n{name} = {target}\n")
        return name

    yield install
    sys.modules.pop("their_backend", None)
    for cache in caches:
        cache.cache_clear()


REQUIRE = "from burst_portable.backends.base import require_package\n"
BACKEND = """
from burst_portable.backends.base import Backend, Capabilities, Probe, HardwareSpec
from burst_portable.kernels.reference import ReferenceKernel

class Theirs(Backend):
    name = "theirs"
    capabilities = Capabilities("cpu", "gloo", False, HardwareSpec(tflops=0.05, intra_node_bandwidth=1.0))

    def probe(self):
        return Probe(True)

    def kernels(self):
        return (ReferenceKernel(),)
"""
WRONG = {
    "absent, imported": ("import their_vendor\n", "needs their_vendor, which is absent", "install their_vendor"),
    "absent, required": (
        REQUIRE + "require_package('vendor-torch', '2.0')\n",
        "vendor-torch is not installed",
        "pip install",
    ),
    "too old": (
        REQUIRE + "require_package('torch', '99.1')\n",
        "the package torch is too old; got 2.",
        "allowed: 99.1 or later",
    ),
    "broken": ("1 / 0\n", "is broken: it fails to import; got ZeroDivisionError", "python -c 'import their_backend'"),
    "broken by an import": ("from torch import no_such_name\n", "is broken", "reinstall that package"),
    "no backend": (
        "backend = object()\n",
        "its class 'object' does not derive from burst_portable.backends.base.Backend",
        "upgrade",
    ),
    "a class": (BACKEND + "backend = Theirs\n", "it is a class; register an object", "backend = Theirs()"),
    "another name": (
        BACKEND + "Theirs.name = 'other'\nbackend = Theirs()\n",
        "its name is 'other'; it must be",
        "docs/writing_a_backend.md",
    ),
    "too little": (
        "from burst_portable.backends.base import Backend\nclass Theirs(Backend):\n    name = 'theirs'\n"
        "backend = Theirs()\n",
        "is broken: it fails to import; got TypeError: Can't instantiate abstract class Theirs",
        "implement these methods",
    ),
    "no methods": (
        BACKEND + "Theirs.kernels = ()\nbackend = Theirs()\n",
        "its kernels must be methods",
        "docs/writing_a_backend.md",
    ),
    "no capabilities": (
        BACKEND + "Theirs.capabilities = {}\nbackend = Theirs()\n",
        "are a dict, not a C",
        "docs/writing_a_backend.md",
    ),
    "no rates": (
        BACKEND + "Theirs.capabilities = Capabilities('cpu', 'gloo', False, None)\nbackend = Theirs()\n",
        "the rates of its capabilities are a NoneType, not a HardwareSpec",
        "docs/writing_a_backend.md",
    ),
    "leaves": ("import sys\nsys.exit(3)\n", "is broken: it fails to import; got SystemExit: 3", "reinstall"),
    "nothing of that name": ("", "is broken", "AttributeError"),
}


@pytest.mark.parametrize(("source", "what", "then"), WRONG.values(), ids=list(WRONG))
def test_load_names_fault_of_broken_backend(installed, source, what, then):
    name = installed(source)
    with pytest.raises(BackendUnavailableError) as caught:
        selection.load(name)
    message = str(caught.value)
    assert "'theirs' (from their_backend:backend)" in message
    assert what in message
    assert then in message


@pytest.mark.parametrize("source", ["1 / 0\n", "import their_vendor\n"])
def test_broken_backend_is_ignored_until_named(installed, source):
    installed(source)
    assert selection.for_device("cpu").name == "cpu"


def test_for_device_names_broken_backend_if_no_other_fits(installed):
    installed("import their_vendor\n")
    with pytest.raises(selection.UnsupportedError, match="needs their_vendor, which is absent"):
        selection.for_device("their_device")


PROBES = {
    "1 / 0": "its probe is broken: it raised ZeroDivisionError: division by zero",
    "True": "its probe is broken: it returned a bool, not a Probe",
    "Probe(False)": "it does not say why",
}


@pytest.mark.parametrize(("answer", "reason"), PROBES.items())
def test_invalid_probe_result_is_reported_and_ignored(installed, answer, reason):
    """`explain` and `run` probe all backends."""
    installed(BACKEND + f"Theirs.probe = lambda self: {answer}\nbackend = Theirs()\n")
    with pytest.raises(BackendUnavailableError, match=reason):
        selection.runnable("theirs")
    with pytest.raises(BackendUnavailableError, match=reason):
        check_backend("theirs", coverage="quick")
    q = torch.empty(1, 8, 2, 16)
    assert burst_portable.explain(q, q, q, mask="causal").backend.not_chosen["theirs"] == reason
    backend, _ = choose_backend("auto", 1)
    assert backend.name == "cpu"
    assert doctor.examine()["backends"]["theirs"]["reason"] == reason


def test_check_backend_rejects_device_unknown_to_torch(installed):
    backend = BACKEND + "Theirs.capabilities = Capabilities('their_chip', 'gloo', True, HardwareSpec(1.0, 1.0))\n"
    installed(backend + "backend = Theirs()\n")
    with pytest.raises(BackendUnavailableError, match="torch does not support its device type; got 'their_chip'"):
        check_backend("theirs", coverage="quick")


def test_explain_lists_backends_that_were_not_named(installed):
    installed(BACKEND + "backend = Theirs()\n")
    q = torch.empty(1, 8, 2, 16)
    (told,) = burst_portable.run_threads(1, lambda mesh: burst_portable.explain(q, q, q, mesh=mesh), backend="theirs")
    assert told.backend.not_chosen["cpu"] == "it can serve too, and was not named"


def test_load_rejects_two_packages_with_one_name(installed):
    installed(BACKEND + "backend = Theirs()\n")
    installed("", target="their_backend:other", package="another_package")
    with pytest.raises(BackendUnavailableError, match="got their_backend:backend, their_backend:other; uninstall"):
        selection.load("theirs")


def test_package_cannot_replace_built_in_backend(installed):
    installed("1 / 0\n", name="cpu")
    assert selection.known()["cpu"] == "burst_portable.backends.cpu:backend"
    (told,) = selection.passed_over()
    assert "'cpu' (from their_backend:backend) is not used; got a name that burst_portable has itself" in told


PACKAGES = {
    "absent": ({}, "the package vendor-torch is not installed", "pip install 'vendor-torch>=2.13'"),
    "too old": ({"version": "2.9.1"}, "vendor-torch is too old; got 2.9.1", "allowed: 2.13 or later"),
    "broken": (
        {"version": "2.13.0+cann8.5", "source": "raise OSError('libvendor.so\\nis missing')\n"},
        "vendor-torch 2.13.0+cann8.5 is broken: it fails to import; got OSError: libvendor.so is missing",
        "python -c 'import vendor_torch'",
    ),
}


@pytest.fixture
def vendor(tmp_path, monkeypatch):
    """Return a function that puts a vendor's package with this version and source on the path."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def install(version: str = "", source: str = "") -> None:
        (tmp_path / "vendor_torch.py").write_text(source)
        if version:
            info = tmp_path / "vendor_torch-1.dist-info"
            info.mkdir()
            (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vendor-torch\nVersion: {version}\n")

    yield install
    sys.modules.pop("vendor_torch", None)


@pytest.mark.parametrize(("package", "what", "then"), PACKAGES.values(), ids=list(PACKAGES))
def test_package_error_names_fault_and_remedy(vendor, package, what, then):
    vendor(**package)
    reason = package_error("vendor-torch", "2.13", module="vendor_torch")
    assert what in reason
    assert then in reason


def test_package_error_is_empty_if_import_succeeds(vendor):
    vendor("2.13.0.post1", "answer = 42\n")
    assert package_error("vendor-torch", "2.13", module="vendor_torch") == ""


def problem():
    return kernel_call(torch.bfloat16, "cpu", 4, 2, 64, 64)


def test_lazy_kernel_declines_without_recent_package(vendor):
    absent = LazyKernel("theirs", "nowhere:Kernel", needs="no_such_package")
    assert absent.supports(problem()).reason == "the package no_such_package is not installed"
    vendor(source="__version__ = '2.1.0+rocm'\n")
    old = LazyKernel("theirs", "nowhere:Kernel", needs="vendor_torch", at_least=(3, 6), install="pip install it")
    told = "the package vendor_torch is too old; got 2.1.0+rocm; allowed: 3.6 or later; pip install it"
    assert old.supports(problem()).reason == told


def test_lazy_kernel_of_broken_package_raises(vendor):
    """A broken installed package is an error, not a reason to choose another kernel."""
    vendor(source="raise KeyError('lib.so')\n")
    broken = LazyKernel("theirs", "nowhere:Kernel", needs="vendor_torch")
    with pytest.raises(BackendUnavailableError, match=r"vendor_torch is broken.*KeyError.*reinstall or remove it"):
        broken.supports(problem())


@pytest.mark.parametrize(
    ("target", "got"),
    [
        ("nowhere:Kernel", "ModuleNotFoundError: No module named 'nowhere'"),
        ("vendor_torch.nowhere:Kernel", "ModuleNotFoundError: No module named 'vendor_torch.nowhere'"),
        ("vendor_torch:Absent", "no Absent in it"),
        ("vendor_torch:answer", "answer = 42"),
        ("vendor_torch:Other", "Other = <class 'vendor_torch.Other'>"),
    ],
)
def test_lazy_kernel_names_its_wrong_target(vendor, target, got):
    """The package is not broken, so the user must not reinstall it."""
    vendor(source="answer = 42\nclass Other: pass\n")
    wrong = LazyKernel("theirs", target, needs="vendor_torch")
    for call in (lambda: wrong.supports(problem()), wrong.load):
        with pytest.raises(BackendUnavailableError) as raised:
            call()
        text = str(raised.value)
        assert text.startswith(f"the kernel 'theirs' has a wrong target, '{target}'; got {got}")
        assert 'allowed: "module:Class", where the class can be imported and derives from' in text
        assert text.endswith("correct it in kernels() of the backend, or name another kernel")


@pytest.mark.parametrize("target", ["theirs.Kernel", "theirs:", ":Kernel", "", "theirs Kernel:a:b", None])
def test_lazy_kernel_rejects_target_of_another_form(target):
    with pytest.raises(
        InputError, match=r"'theirs' has a target that names no class; got .*; allowed: \"module:Class\""
    ):
        LazyKernel("theirs", target, needs="json")


def test_lazy_kernel_blames_package_for_import_of_its_target(vendor, tmp_path):
    """The target exists, and imports a part of the package that does not."""
    vendor(source="answer = 42\n")
    (tmp_path / "their_kernel.py").write_text("import vendor_torch.attention\n")
    lazy = LazyKernel("theirs", "their_kernel:Kernel", needs="vendor_torch")
    with pytest.raises(BackendUnavailableError, match="the package vendor_torch is broken: it fails to import"):
        lazy.supports(problem())


def test_choose_backend_auto_skips_broken_backend(installed):
    installed("1 / 0\n")
    backend, why = choose_backend("auto", 1)
    assert backend.name == "cpu"
    assert "not theirs: the backend 'theirs' (from their_backend:backend) is broken" in why


def test_built_in_backends_equal_entry_points():
    project = tomllib.loads((Path(__file__).resolve().parents[2] / "pyproject.toml").read_text(encoding="utf-8"))
    assert project["project"]["entry-points"][selection.GROUP] == selection._OURS
