"""Install packages with entry points for a test, offline."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def install(folder: Path, package: str, points: dict[str, str], group: str, files: dict[str, str]) -> None:
    """Write modules, and the `.dist-info` folder of a package with these entry points (name -> module:attribute)."""
    for name, source in files.items():
        (folder / name).write_text(source)
    info = folder / f"{package}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    lines = "".join(f"{name} = {target}\n" for name, target in points.items())
    (info / "entry_points.txt").write_text(f"[{group}]\n{lines}")


def pip_install(package: Path, folder: Path) -> Path:
    """Install a package of this repository as pip does; return the folder to add to the path.

    The package is copied first, because building writes files into the source folder.
    """
    source, site = folder / "source", folder / "site"
    for file in (f for f in package.rglob("*") if f.is_file() and f.suffix in (".py", ".toml")):
        (source / file.relative_to(package)).parent.mkdir(parents=True, exist_ok=True)
        (source / file.relative_to(package)).write_bytes(file.read_bytes())
    offline = ["--no-deps", "--no-build-isolation", "--no-index", "--disable-pip-version-check", "--quiet"]
    pip = [sys.executable, "-m", "pip", "install", *offline, "--target", str(site), str(source)]
    done = subprocess.run(pip, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return site
