"""Define the reports of scripts that make evidence without a device, and write them."""

from __future__ import annotations

import ast
import hashlib
import platform
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

import torch
import triton

from burst_portable import __version__
from burst_portable.conformance.report import Report, Result

_PACKAGE = Path(__file__).parents[1] / "burst_portable"


def fingerprint(*folders: str, package: Path = _PACKAGE) -> str:
    """Return a hash of the kernels' code in some folders of the package, without comments and docstrings."""
    digest = hashlib.sha256()
    for folder in folders:
        for path in sorted((package / folder).glob("*.py")):
            text = path.read_text(encoding="utf-8")
            if "@triton.jit" in text or "@gluon.jit" in text:
                digest.update(ast.unparse(_bare(ast.parse(text))).encode())
    return digest.hexdigest()[:16]


def _bare(tree: ast.Module) -> ast.Module:
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.FunctionDef | ast.ClassDef) and ast.get_docstring(node) is not None:
            node.body = node.body[1:] or [ast.Pass()]
    return tree


def machine_code(
    backend: str,
    chips: Sequence[str],
    kernels: Sequence[str],
    results: Sequence[Result],
    seconds: float,
    coverage: str,
    sources: str,
) -> Report:
    """Return the report of kernels that were compiled for absent chips. `sources` is their `fingerprint`."""
    return Report(
        backend=backend,
        evidence_level="machine code",
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        seconds=seconds,
        ranks=1,
        coverage=coverage,
        kernel=", ".join(kernels),
        only=tuple(dict.fromkeys(result.check for result in results)),
        kernels=tuple(kernels),
        device={"type": "none", "name": f"{', '.join(chips)}: compiled for, not there", "sources": sources},
        versions={
            "burst_portable": __version__,
            "torch": torch.__version__,
            "triton": triton.__version__,
            "python": platform.python_version(),
            "platform": platform.platform(),
        },
        results=tuple(results),
    )


def finish(made: Report, file: Path | None) -> int:
    """Print the report, write it to `file` if given, and return the exit code."""
    for failure in made.failures:
        print(f"FAILED {failure.check}: {failure.name}: {failure.message}")
    print(f"{made.backend}, {made.evidence_level}: {made.counts()}, {made.seconds:.0f} s")
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(made.to_json(), encoding="utf-8")
    return 0 if made.ok else 1
