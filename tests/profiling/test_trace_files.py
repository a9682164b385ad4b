"""Test Kineto's JSON, new and old, against hand-computed partitions."""

from __future__ import annotations

import gzip
import json

import pytest

import burst_portable as bp
from burst_portable.cli import main
from burst_portable.profiling.trace_files import kind_of, read_trace


def event(category, name, ts, dur):
    return {"ph": "X", "cat": category, "name": name, "ts": ts, "dur": dur, "pid": 0, "tid": 7}


NEW = {
    "baseTimeNanoseconds": 1_700_000_000_000_000_000,
    "distributedInfo": {"backend": "nccl", "rank": 3, "world_size": 8},
    "traceEvents": [
        event("kernel", "flash_fwd_kernel", 0.001, 100.5),
        event("kernel", "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)", 50.001, 100.0),
        event("gpu_memcpy", "Memcpy PtoP (Device -> Device)", 150.001, 10.0),
        event("gpu_memcpy", "Memcpy DtoD (Device -> Device)", 140.001, 30.0),
        event("kernel", "stream_wait_value32", 180.001, 20.0),
        event("gpu_user_annotation", "nccl:send", 0.001, 10_000.0),
        event("cpu_op", "aten::mm", 0.0, 5000.0),
        {"ph": "f", "cat": "ac2g", "ts": 3.0},
    ],
}


def by_hand(found):
    assert found["span_ns"] == 200_000
    assert found["compute_ns"] == 100_500
    assert found["comm_ns"] == 130_000  # 50-160 and 180-200
    assert found["overlap_ns"] == 50_500
    assert found["exposed_comm_ns"] == 79_500
    assert found["exposed_copy_ns"] == 10_000  # 160-170
    assert found["idle_ns"] == 10_000
    assert found["blocking_ns"] == 20_000


def test_read_trace_computes_partition(tmp_path):
    (tmp_path / "new.json").write_text(json.dumps(NEW))
    found = read_trace(tmp_path / "new.json")
    by_hand(found)
    assert (found["rank"], found["events"]) == (3, 5)


def test_read_trace_accepts_older_and_compressed_files(tmp_path):
    old = [{**e, "cat": e["cat"].replace("gpu_m", "M").replace("kernel", "Kernel")} for e in NEW["traceEvents"]]
    (tmp_path / "old.json.gz").write_bytes(gzip.compress(json.dumps({"traceEvents": old}).encode()))
    found = read_trace(tmp_path / "old.json.gz")
    by_hand(found)
    assert found["rank"] is None


def test_read_trace_keeps_nanoseconds_since_1970(tmp_path):
    """Times may be strings, as torch_npu writes them, or numbers that float64 cannot represent."""
    lines = '{"traceEvents": [%s]}' % ", ".join(  # noqa: UP031
        '{"ph": "X", "cat": "kernel", "name": "k", "ts": %s, "dur": 0.001}' % ts  # noqa: UP031
        for ts in ("1700000000000000.001", '"1700000000000000.003"')
    )
    (tmp_path / "exact.json").write_text(lines)
    found = read_trace(tmp_path / "exact.json")
    assert (found["span_ns"], found["compute_ns"], found["idle_ns"]) == (3, 2, 1)


@pytest.mark.parametrize(
    ("category", "name", "kind"),
    [
        ("kernel", "ncclDevKernel_AllGather", "comm"),
        ("kernel", "fmha_fwd", "compute"),
        ("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", "copy"),
        ("gpu_memset", "Memset (Device)", "copy"),
        ("user_annotation", "ncclDevKernel", None),
        ("cpu_op", "c10d::send", None),
    ],
)
def test_kind_of_classifies_events(category, name, kind):
    assert kind_of(category, name) == kind


def test_trace_command_prints_partition(tmp_path, capsys):
    (tmp_path / "new.json").write_text(json.dumps(NEW))
    assert main(["trace", str(tmp_path / "new.json"), "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)["traces"]
    by_hand(found)
    assert main(["trace", str(tmp_path / "new.json")]) == 0
    assert "rank 3" in capsys.readouterr().out


def test_read_trace_rejects_invalid_time(tmp_path):
    event = {"ph": "X", "cat": "kernel", "name": "k", "ts": "soon", "dur": 1}
    (tmp_path / "x.json").write_text(json.dumps({"traceEvents": [event]}))
    with pytest.raises(bp.BurstError, match="'soon' for a time"):
        read_trace(tmp_path / "x.json")


@pytest.mark.parametrize("text", ["no JSON", "{}", '{"traceEvents": []}'])
def test_read_trace_rejects_other_files(tmp_path, text):
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(bp.BurstError, match=r"x\.json"):
        read_trace(tmp_path / "x.json")
