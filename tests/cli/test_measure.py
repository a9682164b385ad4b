"""Test `burst-portable measure` with ranks over gloo: the file that it writes, and its errors."""

from __future__ import annotations

import json
import subprocess
import sys
from datetime import date
from pathlib import Path

import pytest
import torch

from burst_portable.cli import main, measure
from burst_portable.cli.output import console
from burst_portable.planning.hardware import read_hardware_spec

SMALL = ("measure", "--heads", "4", "--kv-heads", "2", "--head-dim", "16", "--seq-len", "64")
ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.usefixtures("ranks_are_forked")
def test_measure_of_two_processes_is_used_by_plan(capfd, tmp_path):
    path = tmp_path / "hardware.json"
    assert main([*SMALL, "--ranks", "2", "--json", str(path)]) == 0
    told = capfd.readouterr()
    assert "measuring cpu_flash, 64 tokens\nmeasuring memory\n" in told.err, "in a log, a line each"
    out = " ".join(told.out.split())
    assert "measured 2 ranks on " in out
    assert f"auto uses them if BURST_HARDWARE_SPEC={path} is set on every rank" in out
    facts = json.loads(path.read_text())
    assert (facts["schema"], facts["ranks"], facts["kernel"]) == ("burst_portable.hardware_spec/3", 2, "cpu_flash")
    assert (facts["transport"], facts["direct_transport"], facts["lengths"]) == ("gloo", "", [16, 64])
    assert facts["versions"]["torch"] == torch.__version__
    assert date.fromisoformat(facts["date"])
    found = read_hardware_spec(path)
    assert 1e-4 < found.hardware.tflops < 10
    assert 1e-3 < found.hardware.intra_node_bandwidth < 1000
    assert found.hardware.intra_node_bandwidth == max(
        intra_node_bandwidth for _, intra_node_bandwidth in found.hardware.p2p_bandwidth
    )
    assert main(["plan", "--seq-len", "4096", "--ranks", "4", "--hardware-spec", str(path), "--json"]) == 0
    planned = json.loads(capfd.readouterr().out)
    assert planned["hardware"]["tflops"] == found.hardware.tflops
    other = "of float32 and not bfloat16, with heads of 16 and not 128, on 2 ranks and not 4"
    assert f"at rates {found.hardware.source}, {other} (" in planned["reason"]


@pytest.mark.full
def test_measure_joins_torchrun(tmp_path):
    """Only rank 0 prints."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*command, "-m", "burst_portable", *SMALL, "--kernel", "reference", "--json"],
        cwd=ROOT, capture_output=True, text=True, check=False, timeout=90,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    facts = json.loads(done.stdout)
    assert (facts["ranks"], facts["kernel"]) == (2, "reference")
    assert done.stderr.count("measured 2 ranks on ") == 1


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("--ranks", "0"), "--ranks is not a size; got 0"),
        (("--ranks", "9999"), "too many ranks for this machine's cores"),
        (("--heads", "5"), "query heads are not a multiple of K/V heads"),
        (("--head-dim", "4096"), "--head-dim is too large"),
        (("--seq-len", "7"), "--seq-len is too short for two lengths"),
        (("--seq-len", "1048576", "--heads", "16384"), "do not fit this machine's memory; got 2 TiB"),
        (("--dtype", "int8"), "unknown dtype"),
        (("--kernel", "cpu_flsh"), "did you mean 'cpu_flash'"),
        (("--backend", "cpuu"), "unknown backend"),
        (("--ranks-per-node", "3"), "3"),
        (("--json", "/no/such/folder/file"), "--json cannot be written"),
    ],
)
def test_measure_rejects_options_before_start(capsys, monkeypatch, arguments, told):
    monkeypatch.setattr("burst_portable.cli.measure_worker.run_processes", lambda *_: pytest.fail("a process started"))
    assert main([*SMALL, *arguments]) == 2
    assert told in capsys.readouterr().err


def test_measure_checks_memory_of_default_length(capsys, monkeypatch):
    monkeypatch.setattr("burst_portable.cli.measure_worker.run_processes", lambda *_: pytest.fail("a process started"))
    assert main(["measure", "--ranks", "1", "--heads", "16384", "--kv-heads", "16384", "--head-dim", "1024"]) == 2
    assert "got 128 GiB of q, k, v and gradients per rank, 1 rank;" in capsys.readouterr().err


def test_measure_warns_of_busy_machine(capsys):
    """Only rates with a round more than 1.3 times the shortest are named."""
    about = dict.fromkeys(("device", "backend", "kernel", "dtype"), "x")
    facts = {**about, "ranks": 1, "heads": 1, "kv_heads": 1, "head_dim": 8, "hardware": {}}

    def show(**rounds: float | None) -> None:
        methods = {name: {"measured": True, "method": "", "max_over_min": most} for name, most in rounds.items()}
        measure.show(console(soft_wrap=True), {**facts, "methods": methods}, None)

    show(tflops=1.31, memory=1.3, link=2.5, intra_node_bandwidth=None)
    told = "warning  rounds differ, tflops by 1.3 times, link by 2.5 times: the machine was busy; measure again\n"
    assert told in capsys.readouterr().out
    show(tflops=1.29)
    assert "warning" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("comm_slowdown_high_priority", None, "as comm_slowdown"),
        ("comm_slowdown_high_priority", [0.25, 0.5], "25.0 % forward, 50.0 % backward"),
        ("multi_launch_efficiency", 0.98, "98.0 %"),
        ("long_kv_efficiency", [0, 1.0], "as for fewer rows"),
        ("long_kv_efficiency", [131072, 0.9], "90.0 % from 131,072 rows"),
        ("block", 1, "exact pairs"),
        ("block", 128, "128 x 128"),
        ("ranks_per_node", 0, "all ranks in one node"),
        ("ranks_per_node", 8, "8"),
    ],
)
def test_value_formats_rates_for_people(name, value, told):
    assert measure._value(name, value) == told
