"""Test that the end-to-end benchmark runs on CPUs with a tiny model: both contestants train as one device does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from benchmarks.end_to_end import config_of_shape
from burst_portable.cli.run.models import build

ROOT = Path(__file__).parents[2]


def run(folder: Path, *program: str, contestants: str, options: Sequence[str] = ()) -> tuple[str, dict]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *program]
    sizes = ["--shape", "tiny", "--layers", "2", "--seq-len", "64", "--dtype", "float32", "--label", "test"]
    done = subprocess.run(
        [*command, *sizes, *options, "--contestants", contestants, "--out", str(folder)],
        cwd=ROOT, capture_output=True, text=True, timeout=100, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout, json.loads((folder / "end-to-end-test.json").read_text(encoding="utf-8"))


@pytest.mark.full
@pytest.mark.slow
def test_end_to_end_training_equals_one_device(tmp_path: Path):
    rank = ("-m", "tests.support.context_parallel_ranks")
    names = ["burst_portable", "burst_portable ring", "context_parallel flash", "context_parallel flash alltoall"]
    names.append("ulysses by the book")
    said, facts = run(tmp_path, *rank, contestants=",".join(names))
    model, _ = build("", config_of_shape("tiny", 2, 64), torch.float32, 0)
    ids = torch.randint(0, 96, (1, 64), generator=torch.Generator().manual_seed(1))
    expected = float(model(input_ids=ids, labels=ids, use_cache=False).loss.detach())
    assert [one["contestant"] for one in facts["results"]] == names
    for one in facts["results"]:
        assert one["reason"] == ""
        assert one["losses"] == pytest.approx([expected] * 3, rel=1e-6)  # parameters do not change
        assert one["gradient_difference"] is None or one["gradient_difference"] < 1e-6
        assert len(one["seconds"]) == 2
        assert one["tokens_per_second"] == pytest.approx(64 / one["seconds_per_step"])
        flops = facts["model"]["model_flops_per_step"]
        assert one["mfu"] == pytest.approx(flops / one["seconds_per_step"] / 2 / facts["peak"]["flops"])
    assert [name in said.splitlines()[-5 + i] for i, name in enumerate(names)] == [True] * 5


@pytest.mark.full
@pytest.mark.slow
def test_end_to_end_training_with_sharded_weights(tmp_path: Path):
    names = ["burst_portable", "burst_portable ring", "ulysses by the book"]
    _, facts = run(tmp_path, "benchmarks/end_to_end.py", contestants=",".join(names), options=["--fsdp"])
    model, _ = build("", config_of_shape("tiny", 2, 64), torch.float32, 0)
    ids = torch.randint(0, 96, (1, 64), generator=torch.Generator().manual_seed(1))
    expected = float(model(input_ids=ids, labels=ids, use_cache=False).loss.detach())
    for one in facts["results"]:
        assert one["reason"] == ""
        assert one["losses"] == pytest.approx([expected] * 3, rel=1e-6)
        assert one["gradient_difference"] is None or one["gradient_difference"] < 1e-6


@pytest.mark.full
@pytest.mark.slow
def test_end_to_end_reports_contestant_that_fails(tmp_path: Path):
    """The steps of the other contestant are still reported."""
    said, facts = run(tmp_path, "benchmarks/end_to_end.py", contestants="burst_portable,context_parallel")
    assert facts["results"][0]["tokens_per_second"] > 0
    assert facts["results"][1]["reason"].startswith("FAILED: RuntimeError: No viable backend")
    assert facts["results"][1]["reason"][:60] in said.splitlines()[-1]
