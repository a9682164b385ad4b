"""Check that the evidence in backends/cuda belongs to the present kernels and tuning tables. No compiler runs."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("triton")

from backends.cuda import aot, machine_code
from backends.evidence import fingerprint
from burst_portable.conformance.report import Report
from burst_portable.kernels.triton.machine_code import launched_kernels, named, tuned

EVIDENCE = Path(__file__).resolve().parents[2] / "backends" / "cuda" / "evidence"


def test_machine_code_evidence_is_current_and_complete():
    report = Report.from_json((EVIDENCE / "machine-code.json").read_text(encoding="utf-8"))
    assert report.ok
    assert report.device["sources"] == fingerprint(*machine_code.SOURCES), f"kernels changed: {machine_code.__doc__}"
    portable = {
        f"{chip} D={head} {kernel}, {named(tuned(chip, kernel, head))}"
        for chip in machine_code.CHIPS
        for head in machine_code.HEADS[chip]
        for kernel in launched_kernels(chip, head)
    }
    assert {r.name for r in report.results if r.check == "compile"} == portable
    hopper = {f"sm_90 {build.name}" for build in aot.builds()}
    assert {r.name for r in report.results if r.check == "hopper"} == hopper
    descriptors = [r.errors.get(machine_code.DOUBTFUL) for r in report.results if r.check == "hopper"]
    assert set(descriptors) == {(0, 0)}


def test_machine_code_report_fails_on_spills_and_descriptors(monkeypatch):
    doubt = "UR4 comes from two places"
    made = aot.Report("backward D=64 bf16", 255, 512, 0, 1024, 4, 0, (), (doubt,), 1.0)
    monkeypatch.setattr(aot, "compile_build", lambda build: made)
    monkeypatch.setattr(machine_code, "kernel_table", lambda chips, heads: ())
    report = machine_code.report(["sm_90"])
    assert not report.ok
    assert report.failures[0].message == f"512 bytes of scratch, allowed 56; {doubt}"
