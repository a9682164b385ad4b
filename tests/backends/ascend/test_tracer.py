"""Test torch_npu's profiler at the level "kernels", with a simulated module.

The trace_view.json follows torch_npu's source.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

import burst_portable as bp
from burst_portable.backends.ascend.tracer import NpuTracer, kineto
from burst_portable.backends.selection import as_kineto
from burst_portable.cli import main
from burst_portable.errors import UnsupportedError
from burst_portable.profiling import tracing
from burst_portable.profiling.analysis.trace_summary import trace_summary
from burst_portable.profiling.event_tables import PlanLocation
from burst_portable.profiling.trace_files import load_trace
from burst_portable.profiling.tracing import Tracer, join, make_tracer

HOST, DEVICE, HCCL, OVERLAP = 4711, 1001, 1002, 1003
BASE = 1_763_700_000_000_000  # microseconds since 1970, the unit of the trace


def x(name, pid, tid, start, length, **args):
    one = {"ph": "X", "name": name, "pid": pid, "tid": tid, "ts": f"{BASE + start}.500", "dur": length, "args": args}
    return {**one, "cat": "cpu_op"} if pid == HOST else one


def flow(at, thread, pid, tid, start):
    """Return the flow events from the operator at `at` to the kernel at `start`.

    Their id is the kernel's start in nanoseconds.
    """
    both = {"bp": "e", "name": "torch_to_npu", "id": (BASE + start) * 1000 + 500, "cat": "async_npu"}
    return [
        {**both, "ph": "s", "pid": HOST, "tid": thread, "ts": f"{BASE + at}.500"},
        {**both, "ph": "f", "pid": pid, "tid": tid, "ts": f"{BASE + start}.500"},
    ]


def process(pid, name):
    return {"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": name}}


def here(step, what, backward=False):
    return str(PlanLocation(2, "ring", backward, 0, 0, step, what))


TRACE = [
    *(process(HOST, "Python"), process(DEVICE, "Ascend Hardware"), process(HCCL, "Communication")),
    process(OVERLAP, "Overlap Analysis"),
    x(here(0, "q2 x kv2"), HOST, 7, 0, 20),
    x("npu::npu_fusion_attention_v2", HOST, 7, 2, 5),
    x(here(0, "posts messages"), HOST, 7, 30, 20),
    x("c10d::send", HOST, 7, 32, 5),
    x("aten::mm", HOST, 7, 60, 5),  # an operator of the model
    x(here(1, "q2 x kv1", backward=True), HOST, 8, 40, 20),  # on autograd's thread, at the same time
    x("aten::mul", HOST, 8, 44, 2),
    x("FlashAttentionScore", DEVICE, 3, 100, 100, **{"Task Type": "MIX_AIC"}),
    *flow(2, 7, DEVICE, 3, 100),
    x("hcom_send__101_0_1", HCCL, 9, 150, 100),
    *flow(32, 7, HCCL, 9, 150),
    x("Notify_Wait", HCCL, 10, 150, 100),  # a part of the send, on a separate plane
    x("MatMulV2", DEVICE, 3, 200, 500, **{"Task Type": "AI_CORE"}),
    *flow(60, 7, DEVICE, 3, 200),
    x("any", DEVICE, 3, 230, 20, **{"Task Type": "EVENT_WAIT"}),
    *flow(44, 8, DEVICE, 3, 230),
    x("Mul", DEVICE, 3, 250, 10, **{"Task Type": "AI_VECTOR_CORE"}),
    *flow(44, 8, DEVICE, 3, 250),
    x("copy", DEVICE, 4, 255, 25, **{"Task Type": "MEMCPY_ASYNC"}),
    *flow(32, 7, DEVICE, 4, 255),
    x("EVENT_RECORD", DEVICE, 3, 300, 1, **{"Task Type": "EVENT_RECORD"}),
    x("Computing", OVERLAP, 0, 100, 600),
]


def test_npu_trace_events_get_names_of_plan():
    joined = join({"traceEvents": kineto(TRACE)})
    assert list(joined) == [2]
    assert joined[2].on_device
    facts = trace_summary(joined[2])
    told = {
        (k["backward"], k["ring_step"], k["activity"], k["kind"], k["name"]): k["time_ns"] for k in facts["kernels"]
    }
    assert told == {
        (0, 0, "q2 x kv2", "compute", "FlashAttentionScore"): 100_000,
        (0, 0, "posts messages", "comm", "hcom_send__101_0_1"): 100_000,
        (0, 0, "posts messages", "copy", "copy"): 25_000,
        (1, 1, "q2 x kv1", "wait", "EVENT_WAIT"): 20_000,
        (1, 1, "q2 x kv1", "compute", "Mul"): 10_000,
    }
    assert facts["partition"] == {
        "span_ns": 180_000,  # 100 to 280
        "compute_ns": 110_000,  # 100-200, 250-260
        "exposed_comm_ns": 50_000,  # 200-250
        "exposed_copy_ns": 20_000,  # 260-280
        "idle_ns": 0,
        "comm_ns": 100_000,
        "overlap_ns": 50_000,
        "blocking_ns": 20_000,
    }


def test_trace_command_reads_npu_trace(tmp_path, capsys):
    path = tmp_path / "trace_view.json"
    path.write_text(json.dumps(TRACE))
    assert main(["trace", str(path), "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)["traces"]
    # All kernels of the device count here, also the model's product from 200 to 700.
    assert (found["span_ns"], found["compute_ns"], found["comm_ns"], found["idle_ns"]) == (600_000, 600_000, 100_000, 0)
    path.write_text(json.dumps([*TRACE, {"ph": "X", "pid": []}]))
    with pytest.raises(bp.BurstError, match=r"trace_view\.json is not a trace: an event cannot be read"):
        load_trace(path)


def test_kineto_ignores_other_traces():
    events = [x("aten::mm", HOST, 7, 0, 5), process(1, "python")]
    assert kineto(events) is None
    assert as_kineto(events) is events


class Profiler:
    """Simulate the used part of torch_npu.profiler.profile. Its errors are printed and not raised."""

    writes = True

    def __init__(self, *, activities, on_trace_ready):
        assert [*activities] == ["cpu", "npu"]
        self._ready = on_trace_ready

    def start(self):
        self.running = True

    def stop(self):
        assert self.running
        if self.writes:
            self._ready()


@pytest.fixture
def torch_npu(monkeypatch):
    """Install a module `torch_npu` whose profiler writes `TRACE`."""

    def handler(folder):
        def ready():
            place = Path(folder) / "host_1_ascend_pt" / "ASCEND_PROFILER_OUTPUT"
            place.mkdir(parents=True)
            (place / "trace_view.json").write_text(json.dumps(TRACE))

        return ready

    module = ModuleType("torch_npu")
    module.profiler = SimpleNamespace(
        ProfilerActivity=SimpleNamespace(CPU="cpu", NPU="npu"), profile=Profiler, tensorboard_trace_handler=handler
    )
    monkeypatch.setitem(sys.modules, "torch_npu", module)


@pytest.fixture
def npus(monkeypatch, torch_npu):
    """Simulate a machine whose accelerator is an NPU, from which the tracer is chosen."""
    from burst_portable.backends.ascend import backend

    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: SimpleNamespace(type="npu"))
    monkeypatch.setattr(tracing, "for_device", lambda device_type: backend)


def test_deep_profile_uses_npu_tracer(npus, tmp_path):
    assert isinstance(make_tracer(), NpuTracer)
    with bp.profile("kernels") as session:
        q = torch.ones(1, 8, 2, 4)
        bp.attention(q, q, q)
    session.write_trace(tmp_path / "trace.json")
    assert json.loads((tmp_path / "trace.json").read_text()) == TRACE
    tracer = Tracer(NpuTracer())
    tracer.start()
    tracer.stop()
    assert list(tracer.kernel_traces()) == [2]


def test_profiler_without_trace_raises_when_report_is_requested(npus, monkeypatch, tmp_path):
    monkeypatch.setattr(Profiler, "writes", False)
    with bp.profile("kernels") as session:
        q = torch.ones(1, 8, 2, 4)
        out = bp.attention(q, q, q)
    assert torch.isfinite(out).all()
    with pytest.raises(UnsupportedError, match="torch_npu's profiler wrote no trace"):
        session.report()
    with pytest.raises(UnsupportedError, match="wrote no trace"):
        session.write_trace(tmp_path / "trace.json")


def test_other_backends_use_torch_tracer():
    from burst_portable.backends.selection import load

    assert all(load(name).tracer() is None for name in ("cpu", "cuda", "rocm"))
    assert isinstance(tracing.make_tracer(), tracing.TorchTracer)
