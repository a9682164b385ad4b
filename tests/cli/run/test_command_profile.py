"""Test `burst-portable run --profile`: a small training on two processes writes its profile to the folder of the
report.
"""

from __future__ import annotations

import json

import pytest

from burst_portable.cli import main
from burst_portable.profiling.intervals import PARTS
from burst_portable.profiling.report import Report
from burst_portable.profiling.report.tables import ablation_text
from tests.support.models import SIZES


@pytest.mark.slow
@pytest.mark.usefixtures("ranks_are_forked")
def test_run_writes_profile(tmp_path, capsys):
    folder, config = tmp_path / "report", tmp_path / "config.json"
    config.write_text(json.dumps({"model_type": "llama", **SIZES, "vocab_size": 256}), encoding="utf-8")
    asked = ["run", "--model", str(config), "--seq-len", "128", "--ranks", "2", "--steps", "3"]
    asked += ["--deep", "--report", str(folder)]
    assert main([*asked, "--ablate", "--check"]) == 0, "the ablation leaves losses and gradients alone"
    printed = capsys.readouterr().out
    data = Report.load(folder / "profile.json").data
    assert f"time    {data['summary']['text']}" in " ".join(printed.splitlines())
    assert f"advice  {data['summary']['recommendation']}" in " ".join(printed.splitlines()), (
        "half of so small a run is outside"
    )
    assert str(folder / "profile.html") in printed
    assert (folder / "profile.html").stat().st_size > 10_000
    assert [rank["rank"] for rank in data["ranks"]] == [0, 1]
    assert f"{ablation_text(data)}" in " ".join(printed.split())
    assert [row["rank"] for row in data["ablation"]] == [0, 1]
    parts = ("without_both_ns", "exposed_communication_ns", "exposed_computing_ns", "hidden_ns")
    assert all(row["full_step_ns"] == sum(row[part] for part in parts) for row in data["ablation"])
    assert all(row["without_both_ns"] > 0 for row in data["ablation"]), (
        "how long, tests/profiling/test_ablation.py asks with known delays"
    )
    assert [one["train_step"] for one in data["train_steps"]] == [1, 2], "the first step warms up, and is left out"
    assert {(one["attention_call"], one["backward"]) for one in data["layers"]} == {
        (c, b) for c in range(2) for b in (0, 1)
    }
    kernels = [k["name"] for one in data["kernel_trace"] for k in one["kernels"]]
    assert "aten::_scaled_dot_product_flash_attention_for_cpu" in kernels
    for rank in data["ranks"]:
        assert rank["span_ns"] == sum(rank[f"{part}_ns"] for part in PARTS)
        assert rank["idle_outside_attention_ns"] > 0, "the rest of the model"
