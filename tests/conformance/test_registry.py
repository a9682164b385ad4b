"""Backends of other people's packages: found, and when something is wrong with them, said so in as many ways."""

from __future__ import annotations

import sys

import pytest

from burst_portable.backends import registry
from burst_portable.errors import BackendUnavailableError


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """Puts a package with an entry point on the path, as pip would: its module's source -> its backend's name."""
    monkeypatch.syspath_prepend(str(tmp_path))
    caches = registry.load, registry.for_device
    for cache in caches:
        cache.cache_clear()

    def install(source: str, name: str = "theirs", target: str = "their_backend:backend") -> str:
        (tmp_path / "their_backend.py").write_text(source)
        info = tmp_path / f"{name}_package-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}-package\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[{registry.GROUP}]\n{name} = {target}\n")
        return name

    yield install
    sys.modules.pop("their_backend", None)
    for cache in caches:
        cache.cache_clear()


REQUIRE = "from burst_portable.backends.base import require\n"
WRONG = {
    "absent, imported": ("import their_vendor\n", "needs their_vendor, which is absent", "install their_vendor"),
    "absent, required": (REQUIRE + "require('vendor-torch', '2.0')\n", "vendor-torch is not installed", "pip install"),
    "too old": (
        REQUIRE + "require('torch', '99.1')\n",
        "the package torch is too old; got 2.",
        "allowed: 99.1 or later",
    ),
    "broken": ("1 / 0\n", "is broken: it fails to import; got ZeroDivisionError", "python -c 'import their_backend'"),
    "broken by an import": ("from torch import no_such_name\n", "is broken", "reinstall that package"),
    "no backend": ("backend = object()\n", "it has no name, capabilities, probe", "upgrade the package"),
    "nothing of that name": ("", "is broken", "AttributeError"),
}


@pytest.mark.parametrize(("source", "what", "then"), WRONG.values(), ids=list(WRONG))
def test_what_is_wrong_is_told(installed, source, what, then):
    name = installed(source)
    with pytest.raises(BackendUnavailableError) as caught:
        registry.load(name)
    message = str(caught.value)
    assert "'theirs' (from their_backend:backend)" in message
    assert what in message
    assert then in message


@pytest.mark.parametrize("source", ["1 / 0\n", "import their_vendor\n"])
def test_a_broken_one_is_in_nobodys_way_until_it_is_named(installed, source):
    installed(source)
    assert registry.for_device("cpu").name == "cpu"


def test_and_is_a_reason_where_no_other_serves_the_device(installed):
    installed("import their_vendor\n")
    with pytest.raises(registry.UnsupportedError, match="needs their_vendor, which is absent"):
        registry.for_device("their_device")


def test_no_package_takes_the_name_of_one_of_ours(installed):
    installed("1 / 0\n", name="cpu")
    assert registry.known()["cpu"] == "burst_portable.backends.cpu:backend"
