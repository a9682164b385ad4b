"""Vendors' packages that are not there."""

from __future__ import annotations

import sys

import pytest


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """Puts a package on the path, as pip would: the distribution's name, its version, its module's source."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def install(name: str, version: str, source: str | None = None, module: str | None = None) -> None:
        module = module or name
        if source is not None:
            monkeypatch.delitem(sys.modules, module, raising=False)
            (tmp_path / f"{module}.py").write_text(source)
        info = tmp_path / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")

    return install
