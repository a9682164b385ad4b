"""Test several devices: streams, meshes and delays must not mix up buffers, and late or wrong peers are reported."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.support.device_trouble import DEADLINE

pytestmark = [
    pytest.mark.device,
    pytest.mark.skipif(torch.accelerator.device_count() < 2, reason="needs two accelerators or more"),
]
ROOT = Path(__file__).parents[2]
TRANSPORTS = ["auto", "nccl", "peer_copy"]
SILENT = ("late", "stopped", "killed")
"""Faults after which rank 1 tells nothing."""


def play(folder: Path, what: str, transport: str, ranks: int) -> dict[int, dict]:
    """Run a job on all ranks and return the JSON of each rank, except that of a rank that is silent."""
    command = [sys.executable, "-m", "tests.support.device_trouble", str(ranks), str(folder)]
    processes = [subprocess.Popen([*command, str(r), what, transport], cwd=ROOT) for r in range(ranks)]
    try:
        for rank, process in enumerate(processes):
            if what not in SILENT or rank != 1:
                process.wait(timeout=200)
    finally:
        for process in processes:
            process.kill()
            process.wait()
    told = {int(path.stem[4:]): json.loads(path.read_text()) for path in folder.glob("rank*.json")}
    silent = [rank for rank in range(ranks) if rank not in told and not (what in SILENT and rank == 1)]
    assert not silent, f"no word of {silent}, which ended with {[processes[r].returncode for r in silent]}; {told}"
    return told


def check_right(folder: Path, what: str, transport: str) -> None:
    """Run a job on all devices and check that no rank reports a wrong result."""
    ranks = torch.accelerator.device_count()
    said = play(folder, what, transport, ranks)
    if any("absent" in one for one in said.values()):
        pytest.skip(next(one["absent"] for one in said.values() if "absent" in one))
    assert len(said) == ranks
    assert all(one["wrong"] == [] for one in said.values()), said


@pytest.mark.timeout(300)
@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("what", ["stress", "stress_groups"])
def test_two_meshes_on_two_streams_with_delays(tmp_path, what, transport):
    """The meshes share a process group or have one each."""
    check_right(tmp_path, what, transport)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("transport", TRANSPORTS[1:])
def test_repeated_calls_allocate_no_memory(tmp_path, transport):
    check_right(tmp_path, "allocations", transport)


@pytest.mark.timeout(300)
@pytest.mark.skipif(not torch.cuda.is_available(), reason="graphs are CUDA's and HIP's")
def test_captured_graph_of_all_ranks_replays(tmp_path):
    """Over NCCL or RCCL only: peer copies reject graph capture."""
    check_right(tmp_path, "graph", "nccl")


@pytest.mark.timeout(300)
@pytest.mark.parametrize("what", SILENT)
@pytest.mark.parametrize("transport", TRANSPORTS[1:])
def test_late_or_lost_peer_raises_and_is_named(tmp_path, what, transport):
    said = play(tmp_path, what, transport, 2)
    if "absent" in said.get(0, {}):
        pytest.skip(said[0]["absent"])
    assert said[0]["error"] in ("CommunicationTimeoutError", "PeerLostError"), said
    assert said[0]["seconds"] <= DEADLINE + 10.0
    assert "rank 0, forward step" in said[0]["message"]
    assert "rank" in said[0]["message"].split("forward step", 1)[1]
    assert "1" in said[0]["message"].split("forward step", 1)[1]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("transport", TRANSPORTS[1:])
def test_different_shapes_raise_on_all_ranks(tmp_path, transport):
    """No rank computes, and each error names both sides."""
    said = play(tmp_path, "shapes", transport, 2)
    if "absent" in said.get(0, {}):
        pytest.skip(said[0]["absent"])
    for rank in (0, 1):
        assert said[rank]["error"] == "MismatchError", said
        assert "rank 0" in said[rank]["message"]
        assert "rank 1" in said[rank]["message"]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("transport", TRANSPORTS[1:])
def test_one_rank_out_of_memory_raises_on_all_ranks(tmp_path, transport):
    said = play(tmp_path, "memory", transport, 2)
    if "absent" in said.get(0, {}):
        pytest.skip(said[0]["absent"])
    if said[1]["error"] == "CommunicationError":  # no memory for messages of peers, on which all ranks agree
        assert "out of memory" in said[1]["message"]
        assert said[0]["error"] == "CommunicationError", said
    else:
        assert said[1]["error"] == "OutOfMemoryError", said
        assert said[0]["error"] in ("CommunicationTimeoutError", "PeerLostError", "MismatchError"), said
    assert "rank 1" in said[0]["message"]
    assert said[0]["seconds"] <= DEADLINE + 15.0
