"""Test rates and the roofline against hand-computed values, and that a report states the evidence of each number."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

import burst_portable as bp
from burst_portable.backends.base import Backend, Peaks
from burst_portable.backends.cpu.backend import CpuBackend
from burst_portable.backends.selection import load
from burst_portable.config import Config
from burst_portable.planning.hardware import SCHEMA
from burst_portable.planning.schedule import BlockTiles, Compute
from burst_portable.planning.tiles import Tile, Tiles
from burst_portable.planning.work import pass_memory
from burst_portable.profiling.analysis.analyze import analyze
from burst_portable.profiling.analysis.evidence import EVIDENCE, evidence_of
from burst_portable.profiling.report import Report
from burst_portable.profiling.report.tables import hardware_text, peaks_text, roofline_text
from tests.support.synthetic_records import Maker, ring

PLAN = {
    "dtype": "bfloat16",
    "planned": {
        "forward": {
            "flops": 1_000_000,
            "memory_bytes": 10_000,
            "sent_bytes": 500,
            "received_bytes": 4000,
            "seconds": 1.0,
            "compute_seconds": 50e-6,
            "link_seconds": 40e-6,
        },
        "alternatives": {"ring": {"sent_bytes": 500, "seconds": 1.0}},
    },
    "strategy": "ring",
    "circulates": {"forward": "kv", "backward": "kv"},
    "hardware": {"tflops": 1.0, "intra_node_bandwidth": 1.0},
    "layout": "zigzag",
}


def two_ranks(peaks: dict[str, Any] | None):
    """Return records in which rank 1 computes 1,000,000 FLOPs in 100 µs, twice.

    It receives 4,000 bytes from 20 to 60 µs.
    """
    a, b = Maker(0), Maker(1)
    a.compute(0, 0, 200, flops=2_000_000)
    a.message(1, 1, sends=True, posted=20, start=200, end=201, size=4000, issued=0)
    b.compute(0, 0, 100, flops=1_000_000)
    b.message(1, 0, sends=False, posted=10, start=100, end=101, arrived=60, size=4000, issued=0)
    b.attention_call = 1
    b.compute(0, 110, 210, flops=1_000_000)
    plan = {**PLAN, "planned": {**PLAN["planned"], "backward": PLAN["planned"]["forward"]}}
    told = {"device": "cuda", "peaks": [peaks] if peaks else []}
    calls = [(0, 0, 0), (0, 1, 0)]
    return [replace(one.records(), plans=[plan], calls=calls, facts=told) for one in (a, b)]


def test_achieved_and_planned_rates():
    rows = analyze(two_ranks(None))["efficiency"]
    assert [(row["rank"], row["pass"]) for row in rows] == [(0, "forward"), (1, "forward")]
    one = rows[1]
    assert (one["count"], one["flops"], one["compute_ns"]) == (2, 2_000_000, 200_000)
    assert one["flops_per_second"] == pytest.approx(2_000_000 / 200e-6)
    assert one["planned_flops_per_second"] == pytest.approx(2_000_000 / 100e-6)
    assert (rows[0]["sent_bytes"], rows[0]["planned_sent_bytes"]) == (4000, 500)
    assert one["sent_bytes"] == 0
    assert one["bytes_per_second"] == pytest.approx(4000 / 40e-6)
    assert one["planned_bytes_per_second"] == pytest.approx(8000 / 80e-6)
    assert one["flops_per_byte"] == 100


@pytest.mark.parametrize(
    ("flops", "bandwidth", "ceiling", "bound"),
    [(40e9, 1e9, 40e9, "compute"), (200e9, 1e9, 100e9, "memory"), (None, 1e9, None, None), (40e9, None, None, None)],
)
def test_roofline_of_achieved_rates(flops, bandwidth, ceiling, bound):
    """100 FLOPs per byte, and 10 GFLOP/s achieved."""
    peaks = {
        "device": "x",
        "dtype": "bfloat16",
        "flops": flops,
        "bandwidth": bandwidth,
        "source": "s",
        "measured": False,
    }
    data = analyze(two_ranks(peaks))
    row = data["efficiency"][1]
    assert (row["ceiling_flops_per_second"], row["bound"]) == (ceiling, bound)
    if ceiling is None:
        assert row["ceiling_fraction"] is None
        assert roofline_text(row) == "unknown"
        assert "unknown" in peaks_text(data)[0]
    else:
        assert row["ceiling_fraction"] == pytest.approx(10e9 / ceiling)
        assert bound in roofline_text(row)


def test_peaks_of_another_dtype_are_ignored():
    peaks = {"device": "x", "dtype": "float32", "flops": 1e9, "bandwidth": 1e9, "source": "s", "measured": False}
    assert analyze(two_ranks(peaks))["efficiency"][0]["ceiling_flops_per_second"] is None


def test_balance_and_contention():
    """Two equal calls on rank 1; a transfer for 40 of 100 µs counts as neither kind."""
    data = analyze(two_ranks(None))
    (row,) = data["balance"]
    assert (row["planned"], row["measured"]) == (1.0, 1.0)
    assert data["contention"] == []
    a, b = Maker(0), Maker(1)
    a.message(1, 1, sends=True, posted=0, start=900, end=901, issued=0)
    b.compute(0, 0, 130)
    b.message(1, 0, sends=False, posted=0, start=300, end=301, arrived=120, issued=0)
    b.compute(0, 130, 230)
    (found,) = analyze([a.records(), b.records()])["contention"]
    assert found == {"rank": 1, "overlapped": 1, "isolated": 1, "ratio": 1.3, "lost_ns": 30_000}


def test_pass_memory_counts_least_traffic_of_kernel():
    """Two overlapping boxes cover queries 0-6 of 8 and keys 2-10; unused rows do not count."""
    plan = bp.plan(seq_len=32, ranks=2, heads=4, kv_heads=2, head_dim=8, v_head_dim=16, batch=3, itemsize=2)
    tiles = Tiles((Tile(0, 4, 2, 10, -99, 99), Tile(2, 6, 4, 8, -99, 99)))
    q, k, v, out, lse = 6 * 4 * 8, 8 * 2 * 8, 8 * 2 * 16, 6 * 4 * 16, 6 * 4
    compute = Compute((0,), (0,), (BlockTiles(tiles, 0, 0),))
    assert pass_memory(plan.call, "forward", compute) == 3 * (2 * (q + k + v) + 4 * (out + lse))
    expected = 3 * (2 * (q + k + v + out) + 4 * (2 * lse + q + k + v))
    assert pass_memory(plan.call, "backward", compute) == expected


def test_session_measures_peaks_and_rates():
    def work(mesh):
        q, k, v = (torch.ones(1, 32, 2, 8, requires_grad=True) for _ in range(3))
        with bp.profile(mesh=mesh) as session:
            bp.attention(q, k, v, mesh=mesh, strategy="ring").sum().backward()
        return session.report()

    report = bp.run_threads(2, work)[0]
    assert {(p["rank"], p["dtype"], p["measured"]) for p in report.data["peaks"]} == {
        (0, "float32", True),
        (1, "float32", True),
    }
    rows = report.data["efficiency"]
    assert [(r["rank"], r["pass"]) for r in rows] == [
        (rank, name) for rank in (0, 1) for name in ("forward", "backward")
    ]
    for row in rows:
        assert row["sent_bytes"] == row["planned_sent_bytes"]
        assert row["ceiling_fraction"] > 0
        assert row["flops_per_second"] == pytest.approx(row["flops"] * 1e9 / row["compute_ns"])


def test_reports_print_unknown_peaks(capsys):
    report = Report(analyze(ring(2, 3)))
    report.data["peaks"] = [{"rank": 0, "device": "chip", "dtype": "bfloat16", "flops": None, "bandwidth": None,
                             "source": "not in the table", "measured": False}]  # fmt: skip
    from burst_portable.profiling.report.html import page

    report.print()
    printed = capsys.readouterr().out
    for text in (printed, page(report.data), report.markdown()):
        assert "chip, bfloat16: FLOP/s unknown, memory unknown (not in the table)" in text
    assert "unknown" in printed.split("efficiency")[1].splitlines()[2]


# --------------------------------------------------------------------------------------------------------- vendors


HOLDERS = {"cuda": "cuda.machines", "rocm": "rocm.device"}
"""The modules that hold the data sheets."""


@pytest.mark.parametrize(
    ("name", "arguments", "tflops", "intra_node_bandwidth"),
    [
        ("cuda", ("NVIDIA H100 80GB HBM3", "bfloat16"), 989.4, 3350),
        ("cuda", ("NVIDIA H200", "float16"), 989.4, 4800),
        ("cuda", ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", "bfloat16"), None, None),
        ("cuda", ("NVIDIA H200", "float32"), None, 4800),
        ("cuda", ("NVIDIA H200 NVL", "bfloat16"), None, None),  # the clock is not that of the H200
        ("cuda", ("NVIDIA L40S", "bfloat16"), 362.05, 864),
        ("rocm", ("AMD Instinct MI250X / MI250", "gfx90a", 110, "bfloat16"), 191.5, 1638.4),
        ("rocm", ("AMD Instinct MI250X / MI250", "gfx90a", 104, "bfloat16"), 181.05, 1638.4),
        ("rocm", ("AMD Instinct MI300X", "gfx942", 304, "bfloat16"), 1307.4, 5300),
        ("rocm", ("AMD Instinct MI300X", "gfx942", 38, "bfloat16"), None, None),
        ("rocm", ("AMD Instinct MI210", "gfx90a", 104, "float32"), None, 1638.4),
    ],
)
def test_peaks_come_from_data_sheet_of_device(name, arguments, tflops, intra_node_bandwidth):
    from importlib import import_module

    found = import_module(f"burst_portable.backends.{HOLDERS[name]}").peaks(*arguments)
    assert found.flops == (None if tflops is None else tflops * 1e12)
    assert found.bandwidth == (None if intra_node_bandwidth is None else intra_node_bandwidth * 1e9)
    assert found.flops is None or found.source.startswith(("NVIDIA ", "AMD Instinct ")), "the sheet is named"
    assert found.source
    assert not found.measured


def test_backend_without_peaks_reports_unknown():
    class Silent(CpuBackend):
        name = "silent"
        peaks = Backend.peaks

    assert Silent().peaks("float32") == Peaks("", "float32", None, None, "the backend 'silent' states none")
    assert all(type(load(name)).peaks is not Backend.peaks for name in ("cpu", "cuda", "rocm", "ascend"))


# -------------------------------------------------------------------------------------------------------- evidence

NAMES = {  # locations, identities and counts, which are no measurements
    *(
        "rank",
        "peer",
        "source",
        "target",
        "ring_step",
        "attention_call",
        "backward",
        "train_step",
        "plan",
        "count",
        "measured_rank",
    ),
    *("planned_rank", "ranks", "calls", "seq_len", "heads", "kv_heads", "head_dim", "v_head_dim", "batch", "itemsize"),
    "head_parallel_size",
    "head_spacing",
}


def numbers(value: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from numbers(inner, (*path, key))
    elif isinstance(value, list):
        for inner in value:
            yield from numbers(inner, path)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield path


def test_each_number_of_report_has_evidence():
    """Fields that contain a number count: `waited` has nanoseconds by rank, `peaks` a source per row."""
    data = analyze(ring(3, 4, slow=[1]))
    data.pop("events")
    told = {path: any(evidence_of(name) for name in path) for path in numbers(data) if path[0] != "peaks"}
    assert [path for path, known in told.items() if not known and path[-1] not in NAMES] == []
    assert {text.split(":")[0] for text in EVIDENCE.values()} == {"events", "trace", "plan", "ablation", "estimate"}
    assert all(row["source"] for row in data["peaks"])
    assert all(loss["evidence"] for loss in data["bottlenecks"])


def test_planned_rates_use_hardware_spec_of_settings(tmp_path, capsys):
    """2 TFLOP/s in backward and 1 in forward, with the source, in all report formats."""
    path = tmp_path / "hardware.json"
    about = {"device": "Abacus", "ranks": 1, "kernel": "beads", "date": "2026-11-22", "dtype": "bfloat16"}
    hardware = {"tflops": 1.0, "backward_tflops": 2.0, "intra_node_bandwidth": 3.0, "launch_latency": 0.0}
    path.write_text(json.dumps({"schema": SCHEMA, "hardware": hardware, **about}))

    def report(file: str) -> Report:
        single = bp.Mesh.single()
        mesh = bp.Mesh(0, 1, single.transport, config=Config(hardware_spec=file))
        q = torch.ones(1, 64, 2, 16, requires_grad=True)
        with bp.profile(mesh=mesh) as session:
            bp.attention(q, q, q, mesh=mesh, strategy="ring").sum().backward()
        return session.report()

    measured = report(str(path))
    assert [row["planned_flops_per_second"] for row in measured.data["efficiency"]] == pytest.approx([1e12, 2e12])
    told = f"1 TFLOP/s and 3 GB/s per rank (measured on Abacus ({path}, 2026-11-22), of bfloat16 and not float32)"
    assert hardware_text(measured.data) == [told]
    measured.print()
    assert f"planned for {told}" in capsys.readouterr().out
    assert f"Planned for {told}." in measured.markdown()
    measured.write_html(tmp_path / "page.html")
    assert f"Planned for {told}.".replace(" ", "") in _page(tmp_path / "page.html")
    assert hardware_text(report("").data)[0].endswith(" (the backend's guess)")
    path.unlink()  # a requested report is written
    gone = hardware_text(report(str(path)).data)[0]
    assert gone.endswith(" (the backend's guess; the hardware spec file in the settings cannot be used)")


def _page(path) -> str:
    return "".join(path.read_text(encoding="utf-8").replace("\u00a0", " ").split())
