"""Test that the benchmark of two levels runs on CPUs: results are correct, and a slow link delays the ring more."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.two_levels import simulated, speeds
from burst_portable.planning.hardware import HardwareSpec
from burst_portable.strategies.registry import strategy_of

ROOT = Path(__file__).parents[2]
BLOCK = 64 * 2 * 4 * 16 * 2  # bytes of K and V per rank
GBPS = BLOCK / 0.05 / 1e9  # 50 ms per block


@pytest.mark.full
@pytest.mark.slow
def test_two_levels_benchmark_runs_on_cpus(tmp_path: Path):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
    told = [
        "--row",
        "tiny",
        "--inter-node-bandwidth",
        str(GBPS),
        "--seconds",
        "0",
        "--calls",
        "1",
        "--out",
        str(tmp_path),
    ]
    found = subprocess.run(
        [*command, str(ROOT / "benchmarks" / "two_levels.py"), *told, "--strategies", "double_ring;ring;usp"],
        cwd=tmp_path, capture_output=True, text=True, timeout=100, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert found.returncode == 0, found.stderr[-3000:]
    results = json.loads((tmp_path / "two-levels-run.json").read_text())["results"]
    by = {(one["strategy"], one["link"]): one for one in results}
    assert len(by) == 9
    for one in results:
        assert one["reason"] == ""
        assert one["link"] == "nothing sent" or max(one["errors"].values()) < 1e-2
    slow = next(link for _, link in by if link.endswith("GB/s"))
    double, single, inside = (by[name, slow] for name in ("double_ring", "ring", "usp"))
    # In forward, a block crosses nodes once in a double ring, and three times in sequence in a ring.
    assert inside["predicted"]["forward"] == pytest.approx(50, rel=0.03)
    assert inside["milliseconds"]["forward"] >= 50
    assert double["predicted"]["forward"] == pytest.approx(50, rel=0.02)
    assert single["predicted"]["forward"] == pytest.approx(150, rel=0.02)
    assert double["milliseconds"]["forward"] >= 50
    assert single["milliseconds"]["forward"] >= 150
    assert [name in found.stdout.splitlines()[-9] for name in ("double_ring", "no slow link")] == [True, True]


def test_speeds_parses_and_rejects_link_speeds():
    assert speeds("5,2.5") == [5.0, 2.5]
    for text in ("0", "-1", "5,inf", "nan"):
        with pytest.raises(ValueError, match="no speed"):
            speeds(text)


def test_simulated_round_hides_slow_link():
    """If a link takes less than a round and more than a step, the double ring is as fast as without a slow link."""
    plain = HardwareSpec(600.0, 300.0, message_latency=0.0, launch_latency=0.0)
    times = {}
    for name in ("double_ring", "ring"):
        for link, hardware in (("none", plain), ("slow", replace(plain, ranks_per_node=4, inter_node_bandwidth=10.0))):
            times[name, link] = simulated(strategy_of(name, 4), 131072, 8, (32, 8), 128, hardware)["forward"]
    assert times["double_ring", "slow"] == pytest.approx(times["double_ring", "none"], rel=1e-3)
    assert times["ring", "slow"] > 1.5 * times["ring", "none"]
