"""Test `burst-portable kernels` on one chip and one head size; tests/kernels/triton/test_machine_code.py tests the
rest.
"""

from __future__ import annotations

import json
from dataclasses import asdict, replace

import pytest

from burst_portable.cli import main
from burst_portable.cli.kernels import kernels
from burst_portable.errors import UnknownNameError
from burst_portable.kernels.triton import machine_code
from burst_portable.kernels.triton.machine_code import Record, launched_kernels


@pytest.mark.full
def test_kernels_json_of_one_chip(capsys):
    assert kernels(["gfx942"], [64], json_name="-") == 0
    told = json.loads(capsys.readouterr().out)
    assert told["schema"] == "burst_portable.kernels/2"
    assert {row["kernel"] for row in told["kernels"]} == set(launched_kernels("gfx942", 64))
    for row in told["kernels"]:
        assert row["instruction"].startswith("v_mfma")
        assert row["problems"] == []
        assert 0 < row["shared"] <= 64 * 1024
        assert row["registers"] > 0
        assert row["occupancy"] > 0


def test_kernels_writes_records_and_fails_on_problems(capsys, monkeypatch):
    """The compilation itself is tested in tests/kernels/triton/test_machine_code.py and test_evidence_rocm.py."""
    good = Record("gfx942", "forward", 64, "128x64", 1.5, registers=200, shared=1024, occupancy=2, instruction="v_mfma")
    bad = replace(good, kernel="keys", scratch=512)
    for made, code in (([good], 0), ([good, bad], 1)):
        monkeypatch.setattr(machine_code, "kernel_table", lambda *_, made=made: iter(made))
        assert kernels(["gfx942"], [64], json_name="-") == code
        told = json.loads(capsys.readouterr().out)
        assert told["schema"] == "burst_portable.kernels/2"
        assert [{**row, "problems": len(row["problems"])} for row in told["kernels"]] == [
            {**asdict(record), "warnings": [], "problems": int(record is bad)} for record in made
        ]


def test_kernels_rejects_unknown_chip():
    with pytest.raises(UnknownNameError, match="sm_90"):
        kernels(["sm_91"], [64], json_name="-")


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("flag", "value"), [("--seq-len", ["1k"]), ("--ranks", ["2"]), ("--dtype", ["float32"]), ("--deterministic", [])]
)
def test_kernels_rejects_options_of_warm(capsys, flag, value):
    """They would change nothing, and the compilation of all kernels takes minutes."""
    assert main(["kernels", flag, *value]) == 2
    assert f"{flag} requires --warm; name the model with --warm, or leave it out" in capsys.readouterr().err


def test_kernels_suggests_nearest_head_sizes(capsys):
    assert main(["kernels", "--head-dim", "64", "--head-dim", "63"]) == 2
    said = capsys.readouterr().err
    assert "--head-dim is not a head size of the kernels; got 63; allowed: multiples of 16 from 16 to 256;" in said
    assert "use 48 or 64" in said
