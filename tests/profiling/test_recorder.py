"""Test records: none if profiling is off, all parts of the plan if it is on, and bitwise unchanged results."""

from __future__ import annotations

import subprocess
from types import SimpleNamespace

import pytest
import torch

import burst_portable as bp
from burst_portable.conformance.cases import STRATEGIES
from burst_portable.planning.cost import rank_cost
from burst_portable.planning.hardware import HardwareSpec
from burst_portable.profiling import recorder as module
from burst_portable.profiling.event_tables import pack, unpack
from burst_portable.profiling.recorder import Recorder
from tests.support.planted_bugs import Planted
from tests.support.recorded_calls import LENGTH, RANKS, inputs, one_step, recorded


@pytest.mark.parametrize("level", ["standard", "basic"])
@pytest.mark.parametrize("strategy", ["ring", "burst", "ulysses"])
def test_recording_leaves_results_bitwise_equal(strategy, level):
    off = bp.run_threads(RANKS, lambda mesh: one_step(mesh, strategy))
    on, _ = recorded(strategy, level)
    for mine, theirs in zip(off, on, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))


@pytest.mark.parametrize("strategy", ["ring", "burst"])
def test_recorded_flops_and_bytes_equal_plan(strategy):
    _, records = recorded(strategy, steps=2)
    plan = bp.plan(
        seq_len=LENGTH, ranks=RANKS, heads=6, kv_heads=3, head_dim=8, batch=2, itemsize=4,
        strategy=strategy, layout="contiguous",
    )  # fmt: skip
    for one in records:
        compute, message = one.tables["compute"], one.tables["message"]
        assert sorted(set(compute["train_step"])) == [0, 1]
        for backward, name in enumerate(("forward", "backward")):
            cost = rank_cost(plan, name, one.rank, HardwareSpec(1, 1))
            assert compute["flops"][compute["backward"] == backward].sum() == 2 * cost.flops
            sent = message.select((message["backward"] == backward) & (message["sends"] == 1))
            assert sent["bytes"].sum() == 2 * cost.sent
            planned = one.plans[0]["planned"][name]
            assert (planned["flops"], planned["sent_bytes"]) == (cost.flops, cost.sent)


@pytest.mark.parametrize("label", STRATEGIES)
def test_steps_and_bytes_of_every_strategy_are_recorded(label):
    """No line of the profiler is about a strategy: steps, launches and bytes are those of the plan."""
    call = {"strategy": STRATEGIES[label], "layout": "contiguous", "seq_len": 31, "mask": "causal"}

    def work(mesh):
        with bp.profile(mesh=mesh) as session:
            q, k = (torch.randn(1, 8 - mesh.rank // 3, heads, 8, requires_grad=True) for heads in (8, 4))
            bp.attention(q, k, k * 1.0, mesh=mesh, **call).sum().backward()
            session.mark()
        return session.gather()

    plan = bp.plan(ranks=4, heads=8, kv_heads=4, head_dim=8, itemsize=4, **call)
    for one in bp.run_threads(4, work)[0]:
        assert [facts["strategy"] for facts in one.plans] == [plan.label]
        tables = [one.tables[kind] for kind in ("compute", "message", "collective")]
        for backward, name in enumerate(("forward", "backward")):
            cost = rank_cost(plan, name, one.rank, HardwareSpec(1, 1))
            launches, messages, collectives = (table.select(table["backward"] == backward) for table in tables)
            steps = [step.index for step in plan.steps(name, one.rank) if step.compute]
            assert sorted(launches["ring_step"]) == sorted(steps * plan.rounds)
            assert len(launches) == cost.launches
            assert launches["flops"].sum() == cost.flops
            reshards = collectives.select(collectives["agreement"] == 0)
            assert messages["bytes"][messages["sends"] == 1].sum() + reshards["bytes"].sum() == cost.sent


def test_each_recorded_message_has_two_ends():
    _, records = recorded("burst")
    ends = []
    for one in records:
        m = one.tables["message"]
        for i in range(len(m)):
            pair = (one.rank, m["peer"][i]) if m["sends"][i] else (m["peer"][i], one.rank)
            ends.append((*pair, m["backward"][i], m["owner"][i], m["result"][i]))
            assert m["posted"][i] <= m["left"][i] <= m["start"][i] <= m["end"][i]
    assert ends
    assert all(ends.count(end) == 2 for end in ends)


def test_recorded_reshards_belong_to_their_pass():
    _, records = recorded("ulysses")
    for one in records:
        c = one.tables["collective"]
        reshards = c.select(c["agreement"] == 0)
        # q, k, v are resharded and the output returned; then dO is resharded and three gradients are returned.
        assert [int((reshards["backward"] == b).sum()) for b in (0, 1)] == [2, 2]
        assert list(one.tables["compute"]["backward"]) == [0, 1]


def test_records_survive_pack_and_unpack():
    _, records = recorded("ring")
    again = unpack(pack(records[1]))
    assert again.rank == 1
    assert again.plans == records[1].plans
    for kind, table in records[1].tables.items():
        assert (again.tables[kind].data == table.data).all()


@pytest.mark.parametrize(("strategy", "forward", "backward"), [("ring", 1, 5), ("burst", 1, 5), ("ulysses", 5, 7)])
def test_recorded_copies_equal_plan(strategy, forward, backward):
    """In rings, each pass packs the local block. For two remote blocks, gradients are zeroed and accumulated.

    Ulysses packs data, copies its local part and orders received data. Resharding to heads takes 2 copies. The way back
    takes 3, or 5 for 3 gradients.
    """
    _, records = recorded(strategy, mask="full")
    for one in records:
        copies = one.tables["copy"]
        assert [int((copies["backward"] == when).sum()) for when in (0, 1)] == [forward, backward]
        assert (copies["end"] >= copies["start"]).all()


def test_light_level_records_kernels_and_block_waits():
    _, records = recorded("ring", "basic")
    message = records[0].tables["message"]
    assert len(records[0].tables["compute"])
    assert len(message)
    assert not message["sends"].any()
    assert not len(records[0].tables["copy"])


def test_session_outside_run_threads_records_all_ranks():
    with bp.profile() as session:
        bp.run_threads(RANKS, lambda mesh: one_step(mesh, "ring"))
    assert [one.rank for one in session.gather()] == list(range(RANKS))


def test_profile_rejects_unknown_level():
    with pytest.raises(bp.BurstError, match="basic, standard, kernels"):
        bp.profile("deeper")


def test_profiling_is_not_imported_without_session(forked_python):
    source = (
        "import sys, torch, burst_portable as bp\n"
        "x = torch.randn(1, 8, 2, 4)\n"
        "bp.attention(x, x, x)\n"
        "assert not [name for name in sys.modules if 'burst_portable.profiling' in name]\n"
    )
    done = subprocess.run([forked_python, "-c", source], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_one_rank_and_light_level_have_reports():
    with bp.profile() as session:
        one_step(bp.Mesh.single(), "ring")
    alone = session.report()
    assert alone.data["ranks"][0]["compute_ns"] > 0
    assert alone.data["links"] == []
    assert alone.summary

    def work(mesh):
        with bp.profile("basic", mesh=mesh) as session:
            one_step(mesh, "ring")
        return session.report()

    report = bp.run_threads(RANKS, work)[0]
    assert report.data["level"] == "basic"
    assert report.data["summary"]["kind"] != "slow link", "what is not recorded is not blamed"
    for rank in report.data["ranks"]:
        assert rank["sent_bytes"] is rank["messages_sent"] is None, "sends are not recorded"
        assert (
            rank["span_ns"] == rank["compute_ns"] + rank["exposed_comm_ns"] + rank["exposed_copy_ns"] + rank["idle_ns"]
        )


def test_backward_after_session_is_recorded():
    q, k, v, dout = inputs(0)
    with bp.profile() as session:
        out = bp.attention(q, k, v)
    out.backward(dout)
    assert list(session.records()[0].tables["compute"]["backward"]) == [0, 1]
    session.mark()
    with pytest.raises(bp.BurstError, match="already open"), session, session:
        pass


def test_device_marks_are_read_by_device_clock(monkeypatch):
    """The host clock may be created after the clock of the device."""
    mark = object()

    class DeviceClock(SimpleNamespace):
        def read(self, what):
            return 77 if what is mark else pytest.fail("not a mark of this clock")

    made = {
        "cuda": DeviceClock(evidence="device events", end=lambda: None),
        "cpu": SimpleNamespace(evidence="host clock", end=lambda: None),
    }
    monkeypatch.setattr(module, "make_clock", lambda device, *, streams: made[device.type])
    monkeypatch.setattr(
        module,
        "for_device",
        lambda name: SimpleNamespace(
            name=name, capabilities=SimpleNamespace(streams=name == "cuda", direct_transport="")
        ),
    )
    recorder = Recorder(0, "host", level="basic")
    for name in ("cuda", "cpu"):
        assert recorder.clock(torch.device(name)) is made[name]
    first = module.COLUMNS["message"].index("arrived")
    recorder.rows["message"].append(tuple(mark if i == first else 0 for i in range(len(module.COLUMNS["message"]))))
    records = recorder.records()
    assert records.tables["message"]["arrived"].tolist() == [77]
    assert (records.evidence, records.facts["device"]) == ("device events", "cuda")


def test_session_names_used_kernels_with_reasons():
    """Each call selects its kernel, so a report must say which one computed, and why not the preferred one."""
    x = torch.randn(1, 8, 2, 8)
    for options, expected in (
        ({}, {"cpu_flash": "the first of the backend's that serves it"}),
        (
            {"softcap": 5.0},
            {"reference": "the first of the backend's that serves it; not cpu_flash: it has no softcap"},
        ),
        ({"kernel": "reference"}, {"reference": "named"}),
    ):
        with bp.profile() as session:
            bp.attention(x, x, x, **options)
        assert session.used_kernels == expected
        assert session.report().data["kernels"] == list(expected)


def test_recorder_describes_backend_of_the_call():
    """The peaks came from the first backend of the device type, although another one computed."""
    backend = Planted(name="other")
    mesh = bp.Mesh.single()
    mesh.backend_for = lambda device_type: backend
    x = torch.randn(1, 8, 2, 8)
    with bp.profile(mesh=mesh) as session:
        bp.attention(x, x, x, mesh=mesh)
    assert [recorder.backend for recorder in session._recorders.values()] == [backend]
    assert session.report().data["backend"] == "other"
    assert session.report().data["peaks"][0]["flops"] is None
