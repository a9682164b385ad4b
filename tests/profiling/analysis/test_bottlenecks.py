"""Test each kind of loss by hand-computed values: it is the largest, its time is right, the advice names a change."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

import burst_portable as bp
from burst_portable.profiling.analysis.analyze import analyze
from burst_portable.profiling.analysis.bottlenecks import find_bottlenecks, link_speeds_text
from burst_portable.profiling.event_tables import RankRecords
from burst_portable.profiling.plan_facts import layout_imbalances
from burst_portable.profiling.report.tables import bottleneck_name
from burst_portable.strategies.ring import RingStrategy
from tests.support.synthetic_records import Maker

SIZES: dict[str, Any] = {"seq_len": 256, "ranks": 2, "head_dim": 16, "itemsize": 2}


def verdict(records: list[RankRecords], kind: str, lost: float, rank: int = -1) -> str:
    """Check the kind, lost microseconds and rank of the summary, and return its recommendation."""
    found = analyze(records)["summary"]
    assert (found["kind"], found["rank"]) == (kind, rank), found["text"]
    assert found["lost_ns"] == pytest.approx(1000 * lost, abs=2)
    return found["recommendation"]


def exposed(plan: bp.plans.Plan | None = None, size: int = 1 << 20, **facts: Any) -> list[RankRecords]:
    """Return records of two ranks that compute for 100 µs, wait 300 for transfers, and compute for 100."""
    makers = Maker(0), Maker(1)
    for one in makers:
        other = 1 - one.rank
        one.compute(0, 0, 100)
        one.message(1, other, sends=True, posted=100, start=100, end=100, owner=one.rank, size=size, issued=0)
        one.message(1, other, sends=False, posted=0, start=100, end=400, owner=other, size=size, issued=0)
        one.compute(1, 400, 500)
    records = [one.records(plan) for one in makers]
    return [replace(one, facts={**one.facts, **facts}) for one in records]


def test_verdict_names_slow_rank():
    a, b, c = makers = [Maker(rank) for rank in range(3)]
    for one, took in zip(makers, (100, 400, 100), strict=True):
        one.compute(0, 0, took)
        one.collective(0, took, 401, backward=1)
    advice = verdict([a.records(), b.records(), c.records()], "slow rank", 300, 1)
    assert "check rank 1: other processes on its device or cores, clocks" in advice


@pytest.mark.parametrize(("ran", "kind", "lost"), [(100, "late launches", 300), (380, "slow rank", 280)])
def test_late_launches_are_not_a_slow_device(ran, kind, lost):
    """Marks of rank 1 are 400 µs apart; its traced kernel takes 100 µs as on other ranks, or 380."""
    makers = [Maker(rank) for rank in range(3)]
    for one, took, kernel in zip(makers, (100, 400, 100), (100, ran, 100), strict=True):
        one.compute(0, 0, took)
        one.collective(0, took, 401, backward=1)
        one.traced(0, took - kernel, took)
    advice = verdict([one.records() for one in makers], kind, lost, 1)
    assert ("tracing slows hosts" in advice) == (kind == "late launches")
    assert bottleneck_name("late launches") == "kernels launched late"


@pytest.mark.parametrize(("mask", "best"), [("causal", "zigzag"), ("documents", "document_zigzag")])
def test_verdict_recommends_balanced_layout(mask, best):
    """Causal and contiguous: pairs of two ranks are as 1 to 3, up to the diagonal."""
    made = bp.Mask.causal() if mask == "causal" else bp.Mask.documents([0, 100, 256])
    plan = bp.plan(mask=made, layout="contiguous", heads=2, **SIZES)
    told = layout_imbalances(plan.call)
    assert min(told, key=told.get) == best
    flops = [sum(s.compute.tiles.num_pairs for s in plan.forward.steps_of(r) if s.compute) for r in range(2)]
    assert told["contiguous"] == pytest.approx(2 * max(flops) / sum(flops))
    makers = [Maker(rank) for rank in range(2)]
    for one, work in zip(makers, flops, strict=True):
        one.compute(0, 0, work / 10, flops=work)
        one.collective(0, work / 10, max(flops) / 10 + 1, backward=1)
    lost = (max(flops) - sum(flops) / 2) / 10
    rank = flops.index(max(flops))
    advice = verdict([one.records(plan) for one in makers], "uneven plan", lost, rank)
    assert f"use layout={best!r}: its busiest rank has {told[best]:.3g} times the mean" in advice


def test_slow_rank_does_not_raise_cost_of_uneven_plan():
    """FLOPs as 1 to 3 to 2, 1 ns each but 10 on rank 0: the cost is the excess of rank 1."""
    makers = [Maker(rank) for rank in range(3)]
    for one, flops, took in zip(makers, (1000, 3000, 2000), (10, 3, 2), strict=True):
        one.compute(0, 0, took, flops=flops)
        one.collective(0, took, 10.1, backward=1)
    losses = analyze([one.records() for one in makers])["bottlenecks"]
    assert [loss["lost_ns"] for loss in losses if loss["kind"] == "uneven plan"] == [1000]


def test_slow_link_is_charged_once():
    """In a ring of four, the wait of rank 2 for rank 1 is passed on to ranks 3, 0 and 1."""
    makers = [Maker(rank) for rank in range(4)]
    for one in makers:
        one.compute(0, 0, 100)
        source, target = (one.rank - 1) % 4, (one.rank + 1) % 4
        took = 1000 if one.rank == 2 else 10
        one.message(1, target, sends=True, posted=0, start=100, end=100, owner=one.rank, issued=0)
        one.message(1, source, sends=False, posted=0, start=100, end=100 + took, owner=source, issued=0)
        one.compute(1, 100 + took, 200 + took)
        one.collective(0, 200 + took, 1210, backward=1)
    report = analyze([one.records() for one in makers])
    assert (report["summary"]["kind"], report["summary"]["rank"], report["summary"]["peer"]) == ("slow link", 1, 2)
    assert report["summary"]["lost_ns"] == 990_000
    assert "try another strategy" in report["summary"]["recommendation"]
    (everywhere,) = (loss for loss in report["bottlenecks"] if loss["kind"] == "communication")
    # 10 µs of each link, the last 10 of the agreement per rank, and the waits of the remaining three ranks at usual
    # bandwidth.
    assert everywhere["lost_ns"] < 60_000


@pytest.mark.parametrize(("others", "kind"), [(250_000_000, "slow link"), (150_000_000, "communication")])
def test_link_as_fast_as_others_is_not_reported_as_slow(others, kind):
    """At 100 MB/s, the link is slow only if the other links reach twice that."""
    report = analyze(exposed())
    report["links"][0]["bytes_per_second"], report["links"][1]["bytes_per_second"] = 100_000_000, others
    causes = {(c["rank"], c["peer"]): c for c in report["causes"] if c["kind"] == "link"}
    first, second = ((link["source"], link["target"]) for link in report["links"])
    causes[second]["wait_ns"] = {who: lost // 10 for who, lost in causes[second]["wait_ns"].items()}
    assert find_bottlenecks(report)[0]["kind"] == kind, causes[first]


def test_link_speed_uses_fitting_unit():
    links = [{"source": 0, "target": 1, "bytes_per_second": 12_500_000_000}]
    links.append({"source": 1, "target": 0, "bytes_per_second": 45_000_000_000})
    assert link_speeds_text({"links": links}, (0, 1)) == "it transfers 12.5 GB/s, others 45 GB/s"


def test_verdict_recommends_circulating_smaller_side():
    as_many = bp.plan(strategy="ring", heads=8, kv_heads=8, **SIZES)
    advice = verdict(exposed(as_many), "communication", 300)
    assert advice.startswith("try burst(transfer=direct), which sends 0.")
    assert "(Q and dO circulate backward)" in advice
    few = bp.plan(strategy="burst", heads=8, kv_heads=1, **SIZES)
    advice = verdict(exposed(few), "communication", 300)
    assert advice.startswith("try ring(transfer=direct), which sends 0.")
    assert "(K and V circulate backward)" in advice


def test_verdict_recommends_direct_transport_of_backend():
    plan = bp.plan(strategy=RingStrategy(), heads=8, kv_heads=1, **SIZES)
    told = {"transport": {"used": "messages", "direct": "copies"}}
    advice = verdict(exposed(plan, **told), "communication", 300)
    assert "try the transport copies (BURST_TRANSPORT=copies) instead of messages, with each block sent" in advice
    told = {"transport": {"used": "copies", "direct": "copies"}}
    assert "BURST_TRANSPORT" not in verdict(exposed(plan, **told), "communication", 300)


def test_verdict_recommends_larger_messages_if_small():
    """At CPU rates, a message takes 200 µs of latency; 64 MB messages are limited by bandwidth."""
    small = bp.plan(strategy="ring", heads=2, kv_heads=1, **SIZES)
    advice = verdict(exposed(small, size=4096), "communication", 300)
    assert "send larger messages: of 4 KiB each, latency costs more than bytes" in advice
    large = bp.plan(strategy="ring", heads=2, kv_heads=1, **{**SIZES, "seq_len": 1 << 20})
    assert "send larger messages" not in verdict(exposed(large), "communication", 300)


def test_verdict_recommends_more_tokens_as_last_resort():
    large = bp.plan(mask="full", strategy="ring", heads=8, kv_heads=1, **{**SIZES, "seq_len": 1 << 20})
    advice = verdict(exposed(large), "communication", 300)
    assert advice.startswith("no other strategy sends fewer bytes here than ring: give each rank more tokens")


def asked(question: float, blocks: float, agreement: bool) -> list[RankRecords]:
    """Return records of two ranks that exchange data among all ranks for `question` µs, then wait `blocks` µs for
    transfers.
    """
    makers = Maker(0), Maker(1)
    for one in makers:
        other = 1 - one.rank
        one.collective(0, 0, question, agreement=agreement)
        one.compute(0, question, question + 100)
        at = question + 100
        one.message(1, other, sends=True, posted=question, start=at, end=at, owner=one.rank, size=4096, issued=0)
        one.message(1, other, sends=False, posted=question, start=at, end=at + blocks, owner=other, size=4096, issued=0)
        one.compute(1, at + blocks, at + blocks + 100)
    plan = bp.plan(strategy="ring", heads=2, kv_heads=1, **SIZES)  # small messages, which are mostly latency
    return [one.records(plan) for one in makers]


def test_agreement_time_is_not_block_transfer():
    """500 µs of agreement and 100 µs of blocks: the agreement has 32 bytes, whatever the sizes."""
    advice = verdict(asked(500, 100, True), "agreement", 500)
    assert "for messages of any size" in advice
    assert "fewer calls" in advice
    assert "larger messages" not in advice
    report = analyze(asked(500, 100, True))
    assert "whether they make the same call" in report["summary"]["text"]
    assert [loss["lost_ns"] for loss in report["bottlenecks"] if loss["kind"] == "communication"] == [100_000]
    assert "send larger messages" in verdict(asked(100, 500, True), "communication", 500)
    assert "send larger messages" in verdict(asked(500, 100, False), "communication", 600), "a reshard's blocks"


def test_verdict_names_late_rank():
    """Rank 1 begins its second attention call 500 µs after rank 0."""
    a, b = Maker(0), Maker(1)
    for one, begins in ((a, 110), (b, 610)):
        one.compute(0, 0, 100)
        one.attention_call = 1
        one.collective(0, begins, 611)
        one.compute(0, 611, 711)
    advice = verdict([a.records(), b.records()], "late rank", 500, 1)
    assert "what rank 1 does between attention calls: data loading" in advice


def test_verdict_of_alternating_late_ranks():
    """Rank 1 is 500 µs late in the second call, and rank 0 450 µs in the third: rank 1 is later by 50 in total."""
    a, b = Maker(0), Maker(1)
    for one, second, third in ((a, 110, 1210), (b, 610, 760)):
        one.compute(0, 0, 100)
        for call, begins, ends in ((1, second, 611), (2, third, 1211)):
            one.attention_call = call
            one.collective(0, begins, ends)
            one.compute(0, ends, ends + 100)
    advice = verdict([a.records(), b.records()], "late ranks", 450)
    assert "what delays all ranks" in advice


def test_verdict_names_gaps_between_kernels():
    a, b = Maker(0), Maker(1)
    for one in (a, b):
        for step in range(3):
            one.compute(step, 300 * step, 300 * step + 100)
    advice = verdict([a.records(), b.records()], "host", 400)
    assert "give each rank more tokens, or use fewer steps" in advice


def apart(gap: float, wait: float) -> list[RankRecords]:
    """Return records of two attention calls of 1000 µs with `gap` µs between them.

    The second waits `wait` µs for transfers.
    """
    makers = Maker(0), Maker(1)
    for one in makers:
        one.compute(0, 0, 1000)
        one.attention_call = 1
        one.collective(0, 1000 + gap, 1000 + gap + wait)
        one.compute(0, 1000 + gap + wait, 2000 + gap + wait)
    return [one.records() for one in makers]


def test_verdict_without_bottleneck_names_time_outside_attention():
    """2000 µs of compute, 40 of communication and 1960 outside of attention."""
    summary = analyze(apart(1960, 40))["summary"]
    assert summary["kind"] == "none"
    assert summary["text"].startswith("Nothing stands out; the largest losses are: agreement 1.0 %. ")
    assert summary["text"].endswith(
        "50.0 % of the time attention computes, 1.0 % is exposed communication, 0.0 % idle between kernels, "
        "49.0 % idle outside of attention."
    )
    assert summary["recommendation"].startswith("profile a full step with torch.profiler")
    assert analyze(apart(200, 40))["summary"]["recommendation"] == "", "a tenth of the time needs no word"


def test_verdict_separates_copies_from_communication():
    maker = Maker(0)
    maker.compute(0, 0, 970)
    maker.copy(0, 970, 1000)
    text = analyze([maker.records()])["summary"]["text"]
    assert (
        "97.0 % of the time attention computes, 0.0 % is exposed communication, 3.0 % exposed copies, 0.0 % idle"
        in text
    )


def test_verdict_names_share_outside_attention():
    assert analyze(apart(1700, 300))["summary"]["text"].endswith(
        "300 µs lost, 7.5 % of the time. 42.5 % is idle outside of attention, which this profile does not record."
    )
    assert "outside" not in analyze(apart(900, 1100))["summary"]["text"]


def test_verdict_names_contention():
    """The kernel takes 100 µs alone and 180 µs next to a watched transfer."""
    a, b = Maker(0), Maker(1)
    a.compute(0, 0, 180)
    a.message(1, 1, sends=True, posted=0, start=280, end=280, issued=0)
    b.compute(0, 0, 180)
    b.message(1, 0, sends=False, posted=0, arrived=180, start=180, end=180, issued=0)
    for one in (a, b):
        one.compute(1, 180, 280)
    told = {"transport": {"used": "messages", "direct": "copies"}}
    records = [replace(one.records(), facts={"device": "cpu", **told}) for one in (a, b)]
    advice = verdict(records, "contention", 80, 0)
    assert "BURST_TRANSPORT=copies" in advice


def test_verdict_of_light_level_recommends_session_level():
    a, b = Maker(0), Maker(1)
    for one in (a, b):
        one.compute(0, 0, 100)
        one.message(1, 1 - one.rank, sends=False, posted=0, start=100, end=300, issued=0)
        one.compute(1, 300, 400)
    records = [replace(one.records(), facts={"device": "cpu", "level": "basic"}) for one in (a, b)]
    assert "level='standard'" in verdict(records, "waiting", 200)
