"""Install packages of a test: modules and the entry points that name them, in a folder on `sys.path`."""

from __future__ import annotations

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
