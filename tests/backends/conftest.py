"""Fixture: simulated packages of vendors that are not installed."""

from __future__ import annotations

import sys

import pytest


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """Return a function that puts a package on the path, as pip would, from its name, version and source."""
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
