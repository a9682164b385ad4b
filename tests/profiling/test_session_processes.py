"""Test processes over gloo with a delay of 50 ms in one place: the summary names the place and the time."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from burst_portable.profiling.ablation import REPEAT
from burst_portable.profiling.report import Report
from tests.support.profiled_gloo_ranks import DELAY, SLOW_RANK, slow_link

pytestmark = pytest.mark.alone

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module", params=[2, 4])
def reports(request, tmp_path_factory):
    """Return the number of ranks, and by case the report and the measured delays in seconds."""
    ranks, folder = request.param, tmp_path_factory.mktemp("gloo")
    command = [sys.executable, "-m", "tests.support.profiled_gloo_ranks", str(ranks), str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
    found = {}
    for what in ("link", "compute", "hidden", *(["ablated"] if ranks == 2 else [])):
        delays = json.loads((folder / f"{what}.delays").read_text())
        assert min(delays) >= DELAY
        found[what] = Report.load(folder / f"{what}.json").data, delays
    return ranks, found


def test_slow_rank_is_named_with_its_cost(reports):
    data, delays = reports[1]["compute"]
    summary = data["summary"]
    assert (summary["kind"], summary["rank"]) == ("slow rank", SLOW_RANK), summary["text"]
    assert f"ank {SLOW_RANK} " in summary["text"]
    kernels = sum(p["kernels"] for p in data["ranks"][SLOW_RANK]["passes"].values())
    assert len(delays) == kernels
    assert summary["lost_ns"] == pytest.approx(sum(delays) * 1e9, rel=0.1)


def test_slow_link_is_named_with_its_cost(reports):
    ranks, (data, delays) = reports[0], reports[1]["link"]
    source, target = slow_link(ranks)
    summary = data["summary"]
    assert (summary["kind"], summary["rank"], summary["peer"]) == ("slow link", source, target), summary["text"]
    assert f"from rank {source} to rank {target}" in summary["text"]
    link = next(x for x in data["links"] if (x["source"], x["target"]) == (source, target))
    assert len(delays) == link["messages"]
    assert summary["lost_ns"] == pytest.approx(sum(delays) * 1e9, rel=0.1)


def test_message_hidden_by_long_kernel_has_no_transfer_time(reports):
    """The messages of some kB are sent 50 ms before a rank waits for them."""
    data, _ = reports[1]["hidden"]
    for link in data["links"]:
        assert link["messages"] > 0
        assert link["transfer_ns"] <= link["observed_messages"] * DELAY / 2 * 1e9, link
    assert all(rank["overlap_ns"] < 0.1 * rank["compute_ns"] for rank in data["ranks"])


def test_ablation_finds_slow_kernels(reports):
    ranks, found = reports
    if ranks == 2:
        data, delays = found["ablated"]
        rows = data["ablation"]
        assert [row["rank"] for row in rows] == [0, 1]
        # Two kernels per step. One step precedes, one warms up, and then full steps alternate with steps without
        # messages.
        steps = [a + b for a, b in zip(delays[::2], delays[1::2], strict=True)]
        assert len(steps) == 2 + 2 * REPEAT
        assert rows[SLOW_RANK]["exposed_computing_ns"] == pytest.approx(min(steps[2::2]) * 1e9, rel=0.1)
        for row in rows:
            parts = ("without_both", "exposed_communication", "exposed_computing", "hidden")
            assert row["full_step_ns"] == sum(row[f"{name}_ns"] for name in parts)


def test_partitions_add_up_on_one_clock(reports):
    for data, _ in reports[1].values():
        assert (data["clock"]["method"], data["clock"]["uncertainty_ns"]) == ("one clock", 0)
        cut = [row for kind in ("ring_steps", "layers", "train_steps") for one in data[kind] for row in one["ranks"]]
        for row in (*data["ranks"], *cut):
            assert (
                row["span_ns"] == row["compute_ns"] + row["exposed_comm_ns"] + row["exposed_copy_ns"] + row["idle_ns"]
            )
            assert min(row[f"{name}_ns"] for name in ("compute", "exposed_comm", "exposed_copy", "idle")) >= 0
