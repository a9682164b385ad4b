"""Test the analysis of events against hand-computed values, and of the golden trace of `profiling/`."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from burst_portable.conformance.checks.profiler import compare_with_events
from burst_portable.profiling.analysis.analyze import SCHEMA, analyze
from burst_portable.profiling.analysis.causes import find_causes
from burst_portable.profiling.analysis.events import LANE_KINDS
from burst_portable.profiling.analysis.matching import align, match
from burst_portable.profiling.event_tables import COLUMNS, RankRecords, Table
from tests.support.synthetic_records import Maker, ring

GOLDEN = Path(__file__).parents[3] / "profiling" / "golden"


def two_ranks() -> list[RankRecords]:
    """Return records of two ranks, with times in microseconds::

    rank 0   compute 0-100 | compute 100-140, posts at 140 |           waits 140-150 for the send
    rank 1   compute 0-60  | waits 60-200 for rank 0's block (posted by itself at 0) | compute 200-260
                             late until 140, on its way until 200
    """
    a, b = Maker(0), Maker(1)
    a.compute(0, 0, 100, 5000)
    a.compute(1, 100, 140, 2000)
    a.message(1, 1, sends=True, posted=140, start=140, end=150, issued=1)
    b.compute(0, 0, 60, 3000)
    b.message(1, 0, sends=False, posted=0, start=60, end=200)
    b.compute(1, 200, 260, 3000)
    return [a.records(), b.records()]


def test_analyze_partitions_time_of_ranks():
    report = analyze(two_ranks())
    zero, one = report["ranks"]
    names = ("span", "compute", "exposed_comm", "exposed_copy", "idle", "overlap", "blocking")
    assert {k: zero[f"{k}_ns"] for k in names} == {
        "span": 150_000, "compute": 140_000, "exposed_comm": 10_000, "exposed_copy": 0, "idle": 0, "overlap": 0,
        "blocking": 10_000,
    }  # fmt: skip
    assert {k: one[f"{k}_ns"] for k in ("span", "compute", "exposed_comm", "idle", "blocking")} == {
        "span": 260_000, "compute": 120_000, "exposed_comm": 140_000, "idle": 0, "blocking": 140_000,
    }  # fmt: skip


def test_analyze_separates_late_sender_and_transfer():
    report = analyze(two_ranks())
    (link,) = report["links"]
    assert (link["sender_wait_ns"], link["transfer_wait_ns"], link["transfer_ns"]) == (80_000, 60_000, 60_000)
    assert link["bytes_per_second"] == round(1000 / 60e-6)
    causes = {(c["kind"], c["rank"], c["peer"]): c["wait_ns"] for c in report["causes"]}
    # Rank 1 waited 80 µs while rank 0 computed (60-140), then 60 µs for the link. The wait of rank 0 is also for the
    # link.
    assert causes["compute", 0, -1] == {"1": 80_000}
    assert causes["link", 0, 1] == {"0": 10_000, "1": 60_000}


def test_step_lasts_until_next_step():
    report = analyze(two_ranks())
    spans = {(s["ring_step"], r["rank"]): r["span_ns"] for s in report["ring_steps"] for r in s["ranks"]}
    assert spans == {(0, 0): 100_000, (1, 0): 50_000, (0, 1): 60_000, (1, 1): 200_000}


def test_forwarded_delay_is_attributed_to_its_origin():
    """Rank 0 computes 500 µs; rank 1 waits and forwards late; rank 2 waits for rank 1."""
    zero, one, two = Maker(0), Maker(1), Maker(2)
    zero.compute(0, 0, 500)
    zero.message(0, 1, sends=True, posted=500, start=500, end=501, issued=0)
    one.compute(0, 0, 100)
    one.message(1, 0, sends=False, posted=0, start=100, end=510)
    one.compute(1, 510, 600)
    one.message(1, 2, sends=True, posted=600, start=600, end=601, owner=1, issued=1)
    two.compute(0, 0, 100)
    two.message(1, 1, sends=False, posted=0, start=100, end=620, owner=1)
    report = analyze([m.records() for m in (zero, one, two)])
    causes = {(c["kind"], c["rank"], c["peer"]): c["wait_ns"] for c in report["causes"]}
    assert causes["compute", 0, -1] == {"1": 400_000, "2": 400_000}
    assert causes["compute", 1, -1] == {"2": 90_000}
    assert causes["link", 0, 1] == {"0": 1_000, "1": 10_000, "2": 10_000}
    assert causes["link", 1, 2] == {"1": 1_000, "2": 20_000}


@pytest.mark.parametrize("result", [False, True])
def test_posted_forward_starts_when_its_block_arrives(result):
    """Hosts post all messages at 10 µs. The first link is slow; the second transfers as soon as rank 1 has the data."""
    zero, one, two = Maker(0), Maker(1), Maker(2)
    zero.compute(0, 0, 100)
    zero.message(0, 1, sends=True, posted=10, start=11, end=12, issued=0, result=result)
    one.compute(0, 0, 100)
    one.message(1, 0, sends=False, posted=10, start=100, end=500, arrived=500, result=result)
    one.compute(8, 500, 590)
    one.message(1, 2, sends=True, posted=10, start=11, end=12, result=result)
    two.compute(0, 0, 100)
    arrived = 600 if result else 520
    two.message(2, 1, sends=False, posted=10, start=100, end=arrived, arrived=arrived, result=result)
    report = analyze([m.records() for m in (zero, one, two)])
    took = {(link["source"], link["target"]): link["transfer_ns"] for link in report["links"]}
    assert took == {(0, 1): 400_000 if result else 490_000, (1, 2): 10_000 if result else 20_000}
    causes = {(c["kind"], c["rank"], c["peer"]): c["wait_ns"] for c in report["causes"]}
    assert causes["link", 0, 1]["2"] == 400_000, "the wait of rank 2 is followed to the slow link"
    assert causes["link", 1, 2] == {"2": took[1, 2]}


def test_device_sends_after_kernels_of_earlier_passes():
    """The host of rank 0 posted at 10 µs, while its device ran another call until 300 µs."""
    zero, one = Maker(0), Maker(1)
    zero.compute(0, 0, 300)
    one.compute(0, 0, 50)
    zero.attention_call = one.attention_call = 1
    zero.message(0, 1, sends=True, posted=10, start=400, end=401, issued=0)
    zero.compute(0, 300, 400)
    one.message(1, 0, sends=False, posted=10, start=50, end=320, arrived=320)
    report = analyze([zero.records(), one.records()])
    assert [link["transfer_ns"] for link in report["links"]] == [20_000]
    causes = {(c["kind"], c["rank"]): c["wait_ns"] for c in report["causes"]}
    assert causes["compute", 0] == {"1": 250_000}


def test_collective_waits_for_its_last_rank():
    makers = [Maker(rank) for rank in range(3)]
    for maker, begins in zip(makers, (0, 100, 30), strict=True):
        maker.compute(0, begins - 20, begins)
        maker.collective(0, begins, 110)
    makers[1].compute(0, 20, 80)
    report = analyze([m.records() for m in makers])
    causes = {(c["kind"], c["rank"]): c["wait_ns"] for c in report["causes"]}
    assert causes["agreement", -1] == {"0": 10_000, "1": 10_000, "2": 10_000}
    assert causes["compute", 1] == {"0": 80_000, "2": 70_000}  # 20-100 and 30-100


@pytest.mark.parametrize(("spacing", "late"), [(1, 1), (2, 2)])
def test_exchange_waits_for_ranks_that_share_heads(spacing, late):
    """Four ranks, two share heads: ranks 0 and 1 with spacing 1, ranks 0 and 2 with spacing 2."""
    makers = [Maker(rank) for rank in range(4)]
    records = []
    for one in makers:
        arrived = 300 if one.rank == late else 100
        one.compute(0, 0, arrived)
        one.collective(0, arrived, 310 if one.rank in (0, late) else 110, agreement=False)
        made = one.records()
        plan = {"head_parallel_size": 2, "head_spacing": spacing, "strategy": "usp"}
        records.append(replace(made, plans=[plan], calls=[(0, 0, 0)]))
    causes = {(c["kind"], c["rank"]): c["wait_ns"] for c in find_causes(records, match(records))}
    assert causes["compute", late] == {"0": 200_000}
    assert causes["collective", -1] == {str(r): 10_000 for r in range(4)}


def test_clocks_of_two_hosts_are_aligned_by_messages():
    """Host b is 7 ms ahead; messages of 40 and 60 µs bound the offset to half their sum."""
    a, b = Maker(0, "a"), Maker(1, "b")
    ahead = 7000
    a.compute(0, 0, 10)
    a.message(0, 1, sends=True, posted=10, start=20, end=21)
    b.message(0, 0, sends=False, posted=ahead, start=ahead + 1, end=ahead + 50)
    b.message(1, 0, sends=True, posted=ahead + 100, start=ahead + 110, end=ahead + 111, owner=1)
    a.message(1, 1, sends=False, posted=50, start=60, end=160, owner=1)
    aligned, clocks = align([a.records(), b.records()])
    assert clocks.method == "messages"
    assert clocks.uncertainty_ns == 50_000
    assert clocks.offsets_ns[0] == 0
    assert abs(clocks.offsets_ns[1] - ahead * 1000) <= clocks.uncertainty_ns
    assert len(match(aligned)) == 2
    assert analyze([a.records(), b.records()])["clock"]["uncertainty_ns"] == 50_000


def test_hosts_without_messages_are_not_compared():
    a, b = Maker(0, "a"), Maker(1, "b")
    a.compute(0, 0, 10)
    b.compute(0, 7000, 7010)
    report = analyze([a.records(), b.records()])
    assert report["clock"]["method"] == "none"
    assert report["causes"] == []


def test_watched_transfer_overlaps_kernel():
    """The transfer from 200 to 300 is hidden by a kernel from 100 to 330."""
    zero, one = Maker(0), Maker(1)
    zero.compute(0, 0, 200)
    zero.message(0, 1, sends=True, posted=200, start=200, end=201, issued=0)
    one.compute(0, 0, 330)
    one.message(1, 0, sends=False, posted=50, arrived=300, start=330, end=331, issued=0)
    one.compute(1, 331, 400)
    report = analyze([zero.records(), one.records()])
    (link,) = report["links"]
    assert (link["observed_messages"], link["transfer_ns"], link["sender_wait_ns"], link["transfer_wait_ns"]) == (
        1,
        100_000,
        0,
        0,
    )
    rank = report["ranks"][1]
    assert (rank["overlap_ns"], rank["comm_ns"], rank["exposed_comm_ns"], rank["compute_ns"]) == (
        100_000,
        100_000,
        0,
        399_000,
    )
    assert rank["idle_ns"] == 1_000, "from 330 to 331 nothing was on its way"
    assert {"transfer"} <= {report["events"]["kinds"][kind] for kind in report["events"]["ranks"][1]["kind"]}


def test_analyze_separates_idle_stream_from_message_wait():
    """Both ranks posted from 0 to 20. The message arrived at 130, but the host continued only at 160.

    ::

        rank 1   compute 20-100 | waits 100-130, idle 130-160 | compute 160-200
    """
    zero, one = Maker(0), Maker(1)
    zero.compute(0, 20, 200)
    zero.message(1, 1, sends=True, posted=0, left=20, arrived=130, start=200, end=210, issued=0)
    one.message(1, 0, sends=False, posted=0, left=20, arrived=130, start=100, end=160, issued=0)
    one.compute(0, 20, 100)
    one.compute(1, 160, 200)
    report = analyze([zero.records(), one.records()])
    (link,) = report["links"]
    assert (link["transfer_ns"], link["sender_wait_ns"], link["transfer_wait_ns"]) == (110_000, 0, 30_000)
    sender, rank = report["ranks"]
    assert (rank["overlap_ns"], rank["blocking_ns"], rank["idle_ns"]) == (80_000, 30_000, 30_000)
    assert rank["exposed_comm_ns"] == 20_000 + 30_000, "posting, and waiting"
    assert sender["blocking_ns"] == 0
    events = report["events"]["ranks"][1]
    drawn = [d for kind, d in zip(events["kind"], events["duration_ns"], strict=True) if LANE_KINDS[kind] == "wait"]
    assert drawn == [30_000]
    assert compare_with_events(report) == "", "the picture shows what is counted"
    assert {(c["kind"], c["rank"], c["peer"]): c["wait_ns"] for c in report["causes"]} == {
        ("link", 0, 1): {"1": 30_000}
    }


@pytest.mark.parametrize(
    ("posted", "start", "took", "seen"),
    [
        (0, 20_000, 41, False),  # it had arrived; the wait took the usual time of a check
        (0, 1_000, 219, False),
        (0, 1_000, 221, True),  # more than ten times the 22 that short waits take
        (
            0,
            20_000,
            2_000,
            False,
        ),  # under a tenth of the possible time of arrival; the host may as well have been delayed
        (0, 18_000, 2_000, True),
        (1_005, 1_000, 30, True),  # not yet sent when the wait began
    ],
)
def test_short_wait_does_not_count_as_transfer(posted, start, took, seen):
    """Rank 1 also waits 22 and 25 µs for its sends; a quarter of its waits take 22 or less."""
    zero, one = Maker(0), Maker(1)
    zero.compute(0, 0, 900)
    zero.message(1, 1, sends=True, posted=posted, start=30_000, end=30_005, issued=0)
    one.compute(0, 0, start)
    one.message(1, 0, sends=False, posted=0, start=start, end=start + took, issued=0)
    for at, asking in ((30_000, 22), (31_000, 25)):
        one.message(2, 0, sends=True, posted=start, start=at, end=at + asking, owner=1, issued=1)
    report = analyze([zero.records(), one.records()])
    (link,) = report["links"]
    transfer = 1000 * (start + took - posted) if seen else 0
    assert (link["messages"], link["observed_messages"], link["transfer_ns"]) == (1, int(seen), transfer)
    assert report["ranks"][1]["overlap_ns"] == (1000 * max(0, start - posted) if seen else 0)
    assert report["ranks"][1]["blocking_ns"] == 1000 * (took + 22 + 25), "a wait stays a wait"


def test_analyze_separates_exposed_copies():
    """::

    compute  0-100                            140-200
    copies        90 ........ 130
    waits                 120 ... 140
    """
    zero, one = Maker(0), Maker(1)
    zero.compute(0, 0, 200)
    zero.message(1, 1, sends=True, posted=50, start=200, end=200, issued=0)
    one.compute(0, 0, 100)
    one.copy(1, 90, 130)
    one.message(1, 0, sends=False, posted=50, start=120, end=140, issued=0)
    one.compute(1, 140, 200)
    report = analyze([zero.records(), one.records()])
    rank = report["ranks"][1]
    parts = [rank[f"{name}_ns"] for name in ("compute", "exposed_comm", "exposed_copy", "idle")]
    assert parts == [160_000, 20_000, 20_000, 0]
    assert compare_with_events(report) == ""
    before, after = (step["ranks"][1]["exposed_copy_ns"] for step in report["ring_steps"])
    assert (before, after) == (0, 20_000)


def test_events_without_duration_do_not_extend_window():
    """The last wait, at 250, is for a message of 130; the window from 200 on is empty."""
    zero, one = Maker(0), Maker(1)
    zero.compute(0, 20, 200)
    zero.message(1, 1, sends=True, posted=0, left=20, start=190, end=195, issued=0)
    one.message(1, 0, sends=False, posted=0, left=20, arrived=130, start=250, end=250, issued=0)
    one.compute(0, 20, 200)
    report = analyze([zero.records(), one.records()])
    assert report["ranks"][1]["span_ns"] == 200_000
    assert compare_with_events(report) == ""


@pytest.mark.parametrize("layout_rank", [0, 2])
def test_verdict_names_uneven_plan(layout_rank):
    makers = [Maker(rank) for rank in range(3)]
    for maker in makers:
        took = 300 if maker.rank == layout_rank else 100
        maker.compute(0, 0, took, flops=took * 10)
        maker.collective(0, took, 301, backward=1)
    summary = analyze([m.records() for m in makers])["summary"]
    assert (summary["kind"], summary["rank"]) == ("uneven plan", layout_rank)
    assert summary["lost_ns"] == pytest.approx(300_000 - 500_000 / 3, abs=2)
    assert "zigzag" in summary["recommendation"]


def test_verdict_of_pure_compute_is_none():
    a, b = Maker(0), Maker(1)
    for maker in (a, b):
        maker.compute(0, 0, 1000)
        maker.compute(1, 1000, 2000)
    summary = analyze([a.records(), b.records()])["summary"]
    assert summary["kind"] == "none"
    assert "100.0 %" in summary["text"]


@pytest.mark.parametrize("path", sorted(GOLDEN.glob("*.json")), ids=lambda path: path.stem)
def test_golden_traces_have_expected_numbers(path):
    golden = json.loads(path.read_text(encoding="utf-8"))
    assert golden["columns"] == {kind: list(columns) for kind, columns in COLUMNS.items()}
    records = []
    for one in golden["ranks"]:
        tables = {kind: Table.of(kind, one["tables"].get(kind, [])) for kind in COLUMNS}
        records.append(RankRecords(one["rank"], one["host"], "host clock", tables))
    report = analyze(records)
    for rank, expected in zip(report["ranks"], golden["expected"]["ranks"], strict=True):
        assert {name: rank[f"{name}_ns"] for name in expected} == expected
    found = [[c["kind"], c["rank"], c["peer"], c["wait_ns"]] for c in report["causes"]]
    assert sorted(found, key=str) == sorted(golden["expected"]["causes"], key=str)


def test_readme_names_every_field():
    readme = (GOLDEN.parent / "README.md").read_text(encoding="utf-8")
    report = analyze(ring(2, 3))
    names = {*report, *report["ranks"][0], *report["links"][0], *report["bottlenecks"][0], *report["causes"][0]}
    names |= {*report["ring_steps"][0]["ranks"][0], *report["prediction"][0], *report["clock"], *report["plans"][0]}
    names |= {*report["events"], *report["events"]["ranks"][0]}
    assert sorted(name for name in names if f"`{name}`" not in readme) == []
    assert SCHEMA in readme
