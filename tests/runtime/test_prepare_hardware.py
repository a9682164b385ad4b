"""Test that `auto` uses the hardware spec file of the settings: it chooses equally on all ranks, or all ranks raise."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
import torch

import burst_portable as bp
from burst_portable.backends.cpu.backend import CpuBackend
from burst_portable.backends.cuda.peers.connection import share_facts
from burst_portable.config import Config
from burst_portable.errors import InputError, MismatchError, UnsupportedError
from burst_portable.planning.hardware import SCHEMA

SIZES = {"heads": 8, "kv_heads": 2, "head_dim": 16}
# Fast: launches are slow and links take no time, so Ulysses is best because it has the fewest launches. Slow: K and V
# of two heads are fewer bytes than those that Ulysses sends for eight heads.
FAST = {
    "tflops": 1.0,
    "intra_node_bandwidth": 1e5,
    "launch_latency": 0.1,
    "message_latency": 0.0,
    "kernel": {"splits_tiles": True},
}
SLOW = {**FAST, "intra_node_bandwidth": 1e-4, "p2p_bandwidth": [[1024, 1e-4]], "launch_latency": 0.0}


@pytest.fixture
def files(tmp_path):
    """Write hardware specs with fast and slow links and return their paths."""

    def written(name: str, hardware: dict, kernel: str = "cpu_flash", ranks: int = 2) -> str:
        about = {"device": f"{name} machine", "ranks": ranks, "kernel": kernel, "date": "2026-11-22"}
        if name == "other":
            about |= {"dtype": "bfloat16", "head_dim": 128}
        path = tmp_path / f"{name}.json"
        path.write_text(json.dumps({"schema": SCHEMA, "hardware": hardware, **about}))
        return str(path)

    return {"fast": written("fast", FAST), "slow": written("slow", SLOW), "other": written("other", SLOW, "beads", 4)}


def with_hardware(mesh: bp.Mesh, file: str, timeout: float = 60.0) -> bp.Mesh:
    return bp.Mesh(mesh.rank, mesh.size, mesh.transport, config=Config(hardware_spec=file, timeout=timeout))


def tensors(mesh: bp.Mesh, rows: int = 32) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(mesh.rank)
    return [torch.randn(1, rows, n, 16, generator=generator) for n in (8, 2, 2)]


def test_auto_chooses_by_hardware_spec(files):
    def work(mesh):
        found = {}
        for name, file in files.items():
            where = with_hardware(mesh, file)
            q, k, v = tensors(mesh)
            out = bp.attention(q, k, v, mesh=where)
            found[name] = bp.explain(q, k, v, mesh=where).strategy, out
        return found

    first, second = bp.run_threads(2, work)
    for name in files:
        assert first[name][0] == second[name][0]
    assert first["fast"][0].name == "ulysses"
    assert first["slow"][0].name == "ring(transfer=direct)"
    assert f"at rates measured on fast machine ({files['fast']}, 2026-11-22) (ulysses" in first["fast"][0].why
    other = first["other"][0].why
    unlike = "the kernel beads and not cpu_flash, of bfloat16 and not float32, with heads of 128 and not 16"
    assert f"2026-11-22), with {unlike}, on 4 ranks and not 2 (" in other
    torch.testing.assert_close(first["fast"][1], first["slow"][1])  # both results are exact


def test_plan_for_mesh_reads_hardware_spec_of_environment(files, monkeypatch):
    """With slow links the layout changes too: neighbors of a window are on one rank."""

    def work(mesh):
        plan = bp.plan_for_mesh(mesh, seq_len=64, mask="window:4", dtype=torch.float32, device="cpu", **SIZES)
        return plan.layout.name, plan.strategy, plan.reason

    chosen = {}
    for name in ("fast", "slow"):
        monkeypatch.setenv("BURST_HARDWARE_SPEC", files[name])
        chosen[name], again = bp.run_threads(2, work)
        assert again == chosen[name]
        assert f"at rates measured on {name} machine" in again[2]
    assert [chosen[name][:2] for name in chosen] == [("zigzag", "ulysses"), ("contiguous", "ring")]


def test_different_hardware_specs_name_both_strategies(files):
    """Rank 0 plans a ring and rank 1 Ulysses; both raise before any block is sent."""

    def work(mesh):
        where = with_hardware(mesh, files["fast" if mesh.rank else "slow"])
        with pytest.raises(
            MismatchError, match=r"strategy: ring .* on rank 0 but ulysses .* on rank 1; .*the same BURST_HARDWARE_SPEC"
        ):
            bp.attention(*tensors(mesh), mesh=where)
        return bp.attention(*tensors(mesh), mesh=with_hardware(mesh, files["slow"])).isfinite().all()

    assert all(bp.run_threads(2, work))


class Straight(CpuBackend):
    """A CPU backend whose ranks exchange data to connect a direct transport, as those of GPUs do."""

    capabilities = replace(CpuBackend.capabilities, direct_transport="straight")

    def connect_direct(self, other, group, timeout):
        share_facts(other, {"reason": ""}, "asking for peer copies")
        raise UnsupportedError("none here")


def test_different_hardware_specs_raise_mismatch_error(files):
    """Rank 0 prepares a ring and rank 1 a direct exchange; the agreement check finds this."""

    def work(mesh):
        where = with_hardware(mesh, files["fast" if mesh.rank else "slow"], timeout=1.0)
        where.group, where.backend_for = object(), lambda device_type: Straight()
        with pytest.raises(MismatchError, match="the ranks do not make the same call"):
            bp.attention(*tensors(mesh), mesh=where)

    bp.run_threads(2, work)


def test_different_hardware_specs_with_equal_plan_work(files):
    def work(mesh):
        where = with_hardware(mesh, files["other" if mesh.rank else "slow"])
        return bp.attention(*tensors(mesh), mesh=where).isfinite().all()

    assert all(bp.run_threads(2, work))


def test_missing_hardware_spec_raises_on_all_ranks(files, tmp_path):
    def work(mesh):
        where = with_hardware(mesh, str(tmp_path / "none.json") if mesh.rank else files["slow"])
        with pytest.raises(InputError if mesh.rank else MismatchError, match=r"none\.json is not a hardware spec file"):
            bp.attention(*tensors(mesh), mesh=where)

    bp.run_threads(2, work)


def test_named_strategy_reads_no_hardware_spec(tmp_path):
    def work(mesh):
        where = with_hardware(mesh, str(tmp_path / "none.json"))
        return float(bp.attention(*tensors(mesh), mesh=where, strategy="ring").sum())

    assert all(map(math.isfinite, bp.run_threads(2, work)))
