"""Check that the evidence from Triton's interpreter belongs to the present kernels. Nothing is interpreted here."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("triton")

from backends import interpreter
from backends.evidence import fingerprint
from burst_portable.conformance.report import Report

FOLDER = Path(interpreter.__file__).parent


@pytest.mark.parametrize("backend", interpreter.SOURCES)
def test_interpreter_evidence_passed_and_is_current(backend):
    report = Report.from_json((FOLDER / backend / "evidence" / "interpreter.json").read_text(encoding="utf-8"))
    assert report.ok
    assert report.device["sources"] == fingerprint(*interpreter.SOURCES[backend]), "kernels changed: make it again"


def test_fingerprint_ignores_comments_and_docstrings(tmp_path):
    kernel, found = tmp_path / "kernel.py", []
    for text in (
        "@triton.jit\ndef add(x):\n    return x + 1\n",
        '"""What it does."""\n# why\n@triton.jit\ndef add(x):\n    """More."""\n    return (x + 1)  # so\n',
        "@triton.jit\ndef add(x):\n    return x + 2\n",
    ):
        kernel.write_text(text)
        (tmp_path / "host.py").write_text(text.replace("@triton.jit", f"# {len(found)}"))
        found.append(fingerprint(".", package=tmp_path))
    assert found[0] == found[1] != found[2]
