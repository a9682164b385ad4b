"""Test the level "kernels": traced events get the names of the plan, on a simulated device and on a real one."""

from __future__ import annotations

import json

import pytest
import torch

import burst_portable as bp
from burst_portable.profiling.analysis.trace_summary import trace_summary
from burst_portable.profiling.event_tables import PlanLocation, RankRecords, pack, unpack
from burst_portable.profiling.tracing import join
from tests.support.synthetic_records import Maker

RANKS = 2


def span(category, name, ts, dur, tid=1, correlation=None):
    args = {} if correlation is None else {"correlation": correlation}
    return {"ph": "X", "cat": category, "name": name, "ts": ts, "dur": dur, "pid": 0, "tid": tid, "args": args}


def here(backward, iteration, step, what):
    return str(PlanLocation(3, "ring", backward, iteration, 0, step, what))


# Host thread 1 launches; the device runs later, on streams 7 and 8. Microseconds.
EVENTS = [
    span("user_annotation", here(False, 0, 1, "q3 x kv2"), 0, 10),
    span("cuda_driver", "cuLaunchKernelEx", 2, 1, correlation=11),
    span("cuda_runtime", "cudaLaunchKernel", 12, 1, correlation=12),  # between annotations, so it belongs to the model
    span("user_annotation", here(False, 0, 1, "posts messages"), 20, 10),
    span("cuda_runtime", "cudaLaunchKernel", 21, 1, correlation=13),
    span("cuda_runtime", "cudaLaunchKernelExC", 23, 1, correlation=14),
    span("cuda_runtime", "cudaLaunchKernel", 22, 1, tid=2, correlation=15),  # another thread, at the same time
    span("user_annotation", here(True, 1, 0, "q3 x kv3"), 40, 10),
    span("cuda_driver", "cuLaunchKernelEx", 41, 1, correlation=16),
    span("kernel", "_forward", 100, 50, tid=7, correlation=11),
    span("kernel", "gemm", 150, 500, tid=7, correlation=12),
    span("kernel", "elementwise_copy", 150, 10, tid=8, correlation=13),
    span("kernel", "ncclDevKernel_SendRecv", 140, 60, tid=8, correlation=14),
    span("kernel", "somebody's", 0, 900, tid=9, correlation=15),
    span("kernel", "_backward", 190, 30, tid=7, correlation=16),
    span("gpu_user_annotation", here(False, 0, 1, "q3 x kv2"), 100, 50, tid=7, correlation=11),
]


def test_traced_facts_of_device_events():
    (rank, traced), *others = join({"traceEvents": EVENTS}).items()
    assert (rank, traced.on_device, others) == (3, True, [])
    facts = trace_summary(traced)
    assert facts["partition"] == {
        "span_ns": 120_000,  # 100 to 220
        "compute_ns": 80_000,  # 100-150, 190-220
        "exposed_comm_ns": 40_000,  # 150-190
        "exposed_copy_ns": 0,
        "idle_ns": 0,
        "comm_ns": 60_000,
        "overlap_ns": 20_000,
        "blocking_ns": 0,
    }
    told = {
        (k["backward"], k["ring_step"], k["activity"], k["kind"], k["name"]): k["time_ns"] for k in facts["kernels"]
    }
    assert told == {
        (0, 1, "q3 x kv2", "compute", "_forward"): 50_000,
        (0, 1, "posts messages", "copy", "elementwise_copy"): 10_000,
        (0, 1, "posts messages", "comm", "ncclDevKernel_SendRecv"): 60_000,
        (1, 0, "q3 x kv3", "compute", "_backward"): 30_000,
    }


def test_contention_compares_kernels_next_to_transfers():
    """Two isolated launches (100) and one next to a transfer (130), and other kernels next to it."""

    def launched(at, what, name, start, stop):
        place = PlanLocation(0, "ring", False, 0, 0, at, what)
        return [
            span("user_annotation", str(place), 10 * at, 5),
            span("cuda_driver", "cuLaunchKernelEx", 10 * at + 1, 1, correlation=at),
            span("kernel", name, start, stop - start, tid=7, correlation=at),
        ]

    events = [
        *launched(0, "q0 x kv0", "_forward", 1000, 1100),
        *launched(1, "q0 x kv1", "_forward", 1100, 1200),
        *launched(2, "posts messages", "ncclDevKernel_SendRecv", 1205, 1700),
        *launched(3, "q0 x kv3", "_forward", 1210, 1340),
        *launched(4, "q0 x kv4", "_forward", 1340, 1400),
        *launched(5, "q0 x kv5", "_merge", 1400, 1500),
    ]
    made = Maker(0)
    for step, flops in enumerate((1000, 1000, 0, 1000, 500, 0)):
        made.compute(step, 0, 1, flops=flops)
    traced = join({"traceEvents": events})[0]
    found = trace_summary(traced, made.records().tables["compute"])["contention"]
    assert found == {"overlapped": 1, "isolated": 2, "ratio": 1.3, "lost_ns": 30_000}
    assert trace_summary(join({"traceEvents": EVENTS})[3])["contention"] is None


def test_traced_kernels_survive_pack_and_unpack():
    traced = join({"traceEvents": EVENTS})[3]
    there = unpack(pack(RankRecords(3, "host", "device events", {}, kernel_trace=traced))).kernel_trace
    assert there.names == traced.names
    assert there.on_device
    assert (there.rows == traced.rows).all()


def results(mesh):
    own = torch.Generator().manual_seed(mesh.rank)
    found = []
    for _ in range(2):
        q, k, v = (torch.randn(1, 48, 2, 8, generator=own).requires_grad_() for _ in range(3))
        out = bp.attention(q, k, v, mesh=mesh, strategy="ring", layout="contiguous")
        out.square().sum().backward()
        found += [out.detach(), q.grad, k.grad, v.grad]
    return found


@pytest.fixture(scope="module")
def session():
    with bp.profile("kernels") as session:
        session.results = bp.run_threads(RANKS, results)
    return session


def test_traced_results_are_bitwise_equal(session):
    for mine, theirs in zip(session.results, bp.run_threads(RANKS, results), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))


def test_cpu_operators_are_assigned_to_marked_kernels(session):
    report = session.report()
    assert [one["rank"] for one in report.data["kernel_trace"]] == [0, 1]
    for one in report.data["kernel_trace"]:
        assert not one["on_device"]
        assert one["partition"] is None
        # Contiguous causal: rank 1 computes two blocks and rank 0 one. There are two calls, forward and backward.
        met = {(k["backward"], k["activity"]) for k in one["kernels"] if k["kind"] == "compute"}
        owners = range(one["rank"] + 1)
        assert met == {(backward, f"q{one['rank']} x kv{owner}") for backward in (0, 1) for owner in owners}
        marked = sum(p["compute_ns"] for p in report.data["ranks"][one["rank"]]["passes"].values())
        traced = sum(k["time_ns"] for k in one["kernels"] if k["kind"] == "compute")
        assert 0 < traced <= marked
        kernels = [k for k in one["kernels"] if "flash_attention" in k["name"]]
        assert {k["count"] for k in kernels} == {2}


def test_reports_contain_traced_kernels(session, tmp_path, capsys):
    report = session.report()
    report.print()
    assert "traced kernel" in capsys.readouterr().out
    report.write_html(tmp_path / "page.html")
    assert "_scaled_dot_product_flash_attention_for_cpu" in (tmp_path / "page.html").read_text()
    session.write_trace(tmp_path / "trace.json")
    names = {event["name"] for event in json.loads((tmp_path / "trace.json").read_text())["traceEvents"]}
    assert str(PlanLocation(1, "ring", True, 0, 1, 1, "q1 x kv0")) in names


def test_process_allows_one_tracer():
    with (
        bp.profile("kernels"),
        pytest.raises(bp.BurstError, match=r"another tracer is already running in this process.*around run_threads"),
        bp.profile("kernels"),
    ):
        pass


def test_session_without_tracer_has_no_trace(tmp_path):
    with bp.profile() as session:
        pass
    with pytest.raises(ValueError, match="no tracer"):
        session.write_trace(tmp_path / "trace.json")
    with bp.profile("kernels") as session, pytest.raises(ValueError, match="not finished"):
        session.write_trace(tmp_path / "trace.json")
