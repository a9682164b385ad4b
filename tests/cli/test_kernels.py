"""Test `burst-portable kernels` on one chip and one head size; tests/kernels/triton/test_machine_code.py tests the
rest.
"""

from __future__ import annotations

import json

import pytest

from burst_portable.cli import main
from burst_portable.cli.kernels import kernels
from burst_portable.errors import UnknownNameError
from burst_portable.kernels.triton.machine_code import launched_kernels


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


def test_kernels_rejects_unknown_chip():
    with pytest.raises(UnknownNameError, match="sm_90"):
        kernels(["sm_91"], [64], json_name="-")


def test_kernels_suggests_nearest_head_sizes(capsys):
    assert main(["kernels", "--head-dim", "64", "--head-dim", "63"]) == 2
    said = capsys.readouterr().err
    assert "--head-dim is not a head size of the kernels; got 63; allowed: multiples of 16 from 16 to 256;" in said
    assert "use 48 or 64" in said
