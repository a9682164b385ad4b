"""Test backends/rocm: launches on a simulated driver, machine-code evidence, and the script for real devices."""

from __future__ import annotations

import importlib
import json
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")

from backends.evidence import fingerprint
from burst_portable.config import environment_of_children
from burst_portable.conformance.report import Report
from burst_portable.kernels.triton.machine_code import launched_kernels, named, tuned

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "backends" / "rocm"


@pytest.fixture
def equipment(monkeypatch):
    """Return a function that imports a module of the folder by name."""
    monkeypatch.syspath_prepend(str(FOLDER))
    names = ("fake_driver", "launches", "machine_code", "tune")
    yield lambda name: importlib.import_module(name)
    for name in names:
        sys.modules.pop(name, None)


@pytest.mark.slow
@pytest.mark.usefixtures("ranks_are_forked")
def test_chip_launches_pass_on_simulated_driver(equipment):
    """The compiled kernels are launched twice: forward, merge, delta, and both halves of backward."""
    results = list(equipment("machine_code").launched("gfx942", "--quick"))
    assert {r.message for r in results} == {""}
    names = [r.name for r in results]
    for use in ("forward", "resumed", "delta", "keys", "queries"):
        assert sum(use in name for name in names) >= 2, names
    assert all(r.ok for r in results)


@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.parametrize("chip", ["gfx90a", "gfx942", "gfx950"])
def test_chip_report_compiles_and_launches_everything(equipment, chip):
    report = equipment("machine_code").report([chip], quick=False)
    assert report.failures == ()
    assert len(report.results) > 50


def launched(equipment, **given):
    """Launch a kernel that was compiled for a multiple of 16, a stride of 1 and a pointer to bfloat16."""
    source = SimpleNamespace(
        fn=SimpleNamespace(__name__="some_kernel", arg_names=["q", "rows", "stride", "scale"]),
        signature={"q": "*bf16", "rows": "i32", "stride": "constexpr", "scale": "fp32"},
        constants={(2,): 1},
        attrs={(0,): [["tt.divisibility", 16]], (1,): [["tt.divisibility", 16]]},
    )
    usual = {"q": torch.zeros(64, dtype=torch.bfloat16), "rows": 32, "stride": 1, "scale": 0.5}
    fake = equipment("fake_driver")
    return fake.Launched(fake.Launcher(source, None), (1, 1, 1), tuple({**usual, **given}.values()))


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"q": torch.zeros(64)}, r"compiled as \*bf16"),
        ({"q": torch.zeros(64, dtype=torch.bfloat16)[1:]}, "q is no multiple of 16"),
        ({"rows": 33}, "rows is no multiple of 16"),
        ({"rows": 1 << 31}, "compiled as i32"),
        ({"stride": 2}, "stride is 2, and was compiled as 1"),
        ({"scale": 1}, "compiled as fp32"),
    ],
)
def test_simulated_driver_detects_wrong_launches(equipment, given, says):
    assert launched(equipment).wrong() == []
    (found,) = launched(equipment, **given).wrong()
    assert re.search(says, found)


def test_tune_estimates_step_from_machine_code(equipment):
    """Tuning tables were ranked by this estimate; the loop is written by hand."""
    tune = equipment("tune")
    outer = [".LBB0_1:", "v_add_u32 v0, v0, v1"]
    inner = [
        ".LBB0_2:",
        "ds_read_b128 v[0:3], v9",
        "v_mfma_f32_32x32x8_bf16 a[0:15], v[0:1], v[2:3], a[0:15]",
        "v_exp_f32_e32 v4, v4 ; comment",
        "v_mul_f32_e32 v4, v4, v5",
        "s_cbranch_scc1 .LBB0_2",
    ]
    (body,) = tune.innermost("\n".join([*outer, *inner, "s_cbranch_scc0 .LBB0_1"]))
    assert len(body) == 5
    assert tune.units(body, "gfx942") == (32.0, 20, 32.0)
    assert tune.units(body, "gfx90a") == (64.0, 20, 32.0)


def test_conform_script_without_device_prints_reason(forked_python):
    environment = environment_of_children(PYTHON=forked_python, PYTHONPATH=str(ROOT))
    command = ["sh", str(FOLDER / "conform.sh")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 2, done.stderr
    assert "is not built for ROCm" in done.stderr
    assert not done.stdout


def test_rocm_evidence_matches_tuning_tables(equipment):
    """No compiler runs: the committed report names what was compiled."""
    machine_code = equipment("machine_code")
    report = Report.from_json((FOLDER / "evidence" / "machine-code.json").read_text(encoding="utf-8"))
    assert report.device["sources"] == fingerprint(*equipment("machine_code").SOURCES), "kernels changed"
    assert report.ok
    expected = {
        f"{chip} D={head} {kernel}, {named(tuned(chip, kernel, head))}"
        for chip in machine_code.CHIPS
        for head in machine_code.HEADS
        for kernel in launched_kernels(chip, head)
    }
    assert {r.name for r in report.results if r.check == "compile"} == expected
    launches = {r.name.partition(" #")[0] for r in report.results if r.check == "launch"}
    for chip in machine_code.CHIPS:
        for case in equipment("launches").CASES:
            assert any(name.startswith(f"{chip} {case} ") for name in launches), (chip, str(case))


def test_tuning_tables_use_best_ranked_blocks(equipment):
    """Each entry is among the eight best block shapes of its group."""
    ranked: dict[tuple[str, str, int], list[str]] = {}
    for row in json.loads((FOLDER / "tuning.json").read_text(encoding="utf-8")):
        ranked.setdefault((row["chip"], row["kernel"], row["head"]), []).append(row["blocks"])
    assert len(ranked) == 3 * 4 * 3
    for (chip, kernel, head), ways in ranked.items():
        taken = named(tuned(chip, kernel, head)).replace(" stages 1", "")
        assert taken in ways, (chip, kernel, head)
