"""Test the benchmark that counts bytes on links, with simulated counters: counts, verdicts and table."""

from __future__ import annotations

import json
import os
import time
from itertools import product
from pathlib import Path

import pytest
import torch

from benchmarks.providers import Absent
from benchmarks.ranks import Links
from benchmarks.ring_rows import ROWS, Row
from benchmarks.wire_bytes import Wire, prepared
from benchmarks.wire_report import Measured, Planned, planned, summary, table, unexplained
from burst_portable.comm.local import Fabric, LocalTransport
from burst_portable.errors import DeviceError
from burst_portable.planning.plans import PASSES
from tests.support.fork_server import run_program
from tests.support.thread_peers import ThreadPeers, World, run_peers

ROOT = Path(__file__).parents[2]
MIB = 1 << 20


# ----------------------------------------------------------------------------------------------- verdicts


def test_unexplained_allows_flags_and_rounding_only():
    """Allowed for ten calls of 8 MB in two messages: 1 % of the bytes, 8 KiB per call, and 64 KiB."""
    allowed = 800_000 + 10 * 2 * 4096 + 65536
    for sign in (1, -1):
        assert unexplained(80_000_000 + sign * allowed, 8_000_000, 2, 10) == 0
        assert unexplained(80_000_000 + sign * (allowed + 3), 8_000_000, 2, 10) == 3
    assert unexplained(160_000_000, 8_000_000, 2, 10) == 80_000_000 - allowed  # each message twice
    assert unexplained(10 * MIB, 0, 2, 10) > 9 * MIB  # a message that is not in the plan


def results():
    right = Measured("row", "ring", "peer_copy", "forward", 2, [(4194304, 2048), (0, 4198400)])
    right.plan = [Planned(2097152, 0, 2), Planned(0, 2097152, 2)]
    twice = Measured("row", "ring", "peer_copy", "backward", 1, [(6 * MIB, 0), (0, 3 * MIB)])
    twice.plan = [Planned(3 * MIB, 0, 1), Planned(0, 3 * MIB, 1)]
    return [right, twice, Measured("row", "double_ring", "peer_copy", reason="serves no such messages")]


def test_table_lists_counted_and_planned_bytes():
    told = table(results())
    assert told[0] == "-- row, ring over peer_copy, forward: bytes a call, of 2"
    assert told[1].split() == [
        "rank",
        *("sent", "by", "the", "plan", "ratio"),
        *("received", "by", "the", "plan", "ratio"),
    ]
    assert told[2].split() == ["0", "2,097,152", "2,097,152", "1.0000", "1,024", "0", "-"]
    assert told[3].split() == ["1", "0", "0", "-", "2,099,200", "2,097,152", "1.0010"]
    assert told[6].split()[:4] == ["0", "6,291,456", "3,145,728", "2.0000"]
    assert told[-1] == "-- row, double_ring over peer_copy: serves no such messages"
    assert {len(line) for line in told if line.startswith(("   ", "rank"))} == {76}


def test_summary_lists_unexplained_bytes():
    told = summary(results(), [(0, 0), (512, 0)], 1.0)
    over, beside = 3 * MIB - 31457 - 4096 - 65536, "where nothing is planned, at most"
    assert told == [
        "idle for 1 s: at most 512 bytes of a rank, one way",
        f"peer_copy, forward: counted over planned 1.0000 to 1.0010; {beside} 1,024 bytes a call",
        f"peer_copy, backward: counted over planned 1.0000 to 2.0000; {beside} 0 bytes a call",
        f"not explained by flags and rounding: row, ring over peer_copy, backward, rank 0, sent: {over:,} bytes a call",
    ]
    assert [one.unexplained() for one in results()] == [{}, {"rank 0, sent": over}, {}]


# ------------------------------------------------------------------------------------------------- counting


class Counters:
    """Return the elements of `values` in order, and then the last one again."""

    def __init__(self, *values: int) -> None:
        self.values = list(values)

    def read(self):
        value = self.values.pop(0) if len(self.values) > 1 else self.values[0]
        return value, 2 * value


def single_wire(counters) -> Wire:
    return Wire(counters, LocalTransport(Fabric(1, 1.0), 0), lambda: None)


def test_during_waits_for_delayed_counters():
    assert single_wire(Counters(5, 7, 7, 7, 8, 9, 9)).during(lambda: None, 1) == [(2, 4)]


def test_during_rejects_counters_that_go_backwards():
    with pytest.raises(DeviceError, match=r"went backwards, from \(7, 14\) to \(0, 0\)"):
        single_wire(Counters(7, 7, 0)).during(lambda: None, 1)


def test_during_reads_counters_that_never_settle():
    started = time.monotonic()
    assert single_wire(Counters(*range(1000))).during(lambda: None, 1)[0][0] > 0
    assert time.monotonic() - started < 10


FULL = Row(2048, (2, 2), 64, mask="full", layout="contiguous")
STRATEGIES = ("ring(transfer=direct)", "burst(transfer=direct, prefetch_steps=64, blocks_per_launch=64)", "ulysses")
FEW = {
    "full": FULL,
    "causal": Row(256, (4, 2), 16),
    "window": Row(256, (4, 4), 16, mask="window:64", layout="contiguous"),
    "documents": Row(256, (4, 4), 16, mask="documents:0,100,110,230,256", layout="contiguous"),
}


def count_bytes(row: Row, strategy: str, ranks: int, peers: type[ThreadPeers] = ThreadPeers, calls: int = 2):
    """Return by pass the bytes that each rank sent and received between threads, and the planned bytes."""
    world = World(ranks)

    class Counters:
        def __init__(self, rank: int) -> None:
            self.rank = rank

        def read(self):
            return world.copied[self.rank], sum(to[self.rank] for to in world.moved)

    def work(mesh):
        transport = mesh.transport("cpu")
        links = Links(None, mesh.rank, ranks, torch.device("cpu"), 20.0, {"peer_copy": transport})
        plan, passes = prepared(links, row, strategy, "peer_copy")
        wire = Wire(Counters(mesh.rank), transport, lambda: None)
        found = []
        for which, call in zip(PASSES, passes, strict=True):
            call()
            found.append((wire.during(call, calls), [planned(plan, which, rank) for rank in range(ranks)]))
        return found

    told = run_peers(world, work, peers)
    assert all(one == told[0] for one in told), "every rank hears of all"
    return told[0]


@pytest.mark.parametrize(
    ("name", "strategy"),
    [*product(FEW, STRATEGIES), *product(("window", "documents"), ("ulysses(head_groups=2)",))],
)
def test_counted_bytes_equal_plan(name, strategy):
    for crossed, plans in count_bytes(FEW[name], strategy, 2):
        assert crossed == [(2 * one.sent, 2 * one.received) for one in plans]
        assert any(one.sent for one in plans)
        assert all(one.messages > 2 for one in plans)


class Twice(ThreadPeers):
    """Send every message twice: results are correct, and links carry twice the bytes."""

    def copy(self, leaving, *, exclusive):
        super().copy(leaving, exclusive=exclusive)
        super().copy(leaving, exclusive=exclusive)


@pytest.mark.parametrize("strategy", ["ring(transfer=direct)", "ulysses"])
def test_unexplained_detects_messages_sent_twice(strategy):
    for crossed, plans in count_bytes(FULL, strategy, 2, Twice):
        assert crossed == [(4 * one.sent, 4 * one.received) for one in plans]
        one = Measured("row", strategy, "peer_copy", "", 2, crossed, plans)
        assert one.unexplained().keys() == {f"rank {rank}, {way}" for rank in (0, 1) for way in ("sent", "received")}
        one.counted = [(2 * plan.sent, 2 * plan.received) for plan in plans]
        assert one.unexplained() == {}


def test_unexplained_detects_plan_of_another_mask():
    """The plan of a full mask does not explain the bytes of a window, nor the reverse."""
    window = Row(2048, (2, 2), 64, mask="window:256", layout="contiguous")
    (full, full_plan), (less, less_plan) = (
        count_bytes(row, "ring(transfer=direct)", 2, calls=1)[0] for row in (FULL, window)
    )
    assert Measured("", "", "", "", 1, full, full_plan).unexplained() == {}
    assert Measured("", "", "", "", 1, less, less_plan).unexplained() == {}
    assert len(Measured("", "", "", "", 1, less, full_plan).unexplained()) == 4
    assert len(Measured("", "", "", "", 1, full, less_plan).unexplained()) == 4


def test_prepared_raises_if_transport_is_unsuitable():
    def work(mesh):
        links = Links(None, mesh.rank, 2, torch.device("cpu"), 20.0, {"peer_copy": mesh.transport("cpu")})
        with pytest.raises(Absent, match="serves only messages that go straight"):
            prepared(links, ROWS["tiny"], "ring", "peer_copy")

    run_peers(World(2), work)


# ---------------------------------------------------------------------------------------------- the benchmark


@pytest.mark.slow
@pytest.mark.full
@pytest.mark.timeout(200)
def test_wire_bytes_over_gloo_equal_plan(tmp_path):
    """Simulated counters count the bytes given to the transport; they equal the plan on every rank."""
    told = ["--rows", "tiny,tiny-window", "--strategies", "ring,burst(transfer=direct),ulysses,double_ring"]
    told += ["--calls", "3", "--transports", "gloo,peer_copy", "--json", str(tmp_path / "wire.json")]
    done = run_program("tests.support.ranks_of", 2, "tests.support.wire_bytes_ranks", *told, timeout=180)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads((tmp_path / "wire.json").read_text())
    assert found["idle"]["counted"] == [[0, 0], [0, 0]]
    assert found["setting"]["ranks"] == 2
    assert len(found["results"]) == 2 * 4 * 2
    for one in found["results"]:
        assert one["reason"] == ""
        assert one["unexplained"] == {}
        assert one["counted"] == [[3 * plan["sent"], 3 * plan["received"]] for plan in one["plan"]]
        assert any(plan["sent"] for plan in one["plan"])
    assert "no peer_copy: the backend cpu has none of that name" in done.stdout
    assert "tiny-window, ulysses over gloo: done after" in done.stdout
    assert "gloo, backward: counted over planned 1.0000 to 1.0000" in done.stdout.splitlines()[-1]


def test_wire_bytes_without_counters_gives_reason():
    alone = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    done = run_program(ROOT / "benchmarks" / "wire_bytes.py", environment={**os.environ, **alone})
    assert done.returncode == 2, done.stderr
    assert done.stdout == ""
    why = "the backend 'cpu' does not count what crosses links between devices"
    assert f"wire_bytes.py: rank 0 cannot count what crosses links: {why}\n" in done.stderr
