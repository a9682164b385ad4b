"""From records to the report's data: partitions of ranks, steps, layers and training steps, links, causes, verdict.

Times, bytes and FLOPs are whole numbers; how each is known stands in `evidence`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from burst_portable.plans import PASSES
from burst_portable.profiling.achieved import achieved, balance
from burst_portable.profiling.causes import find_causes, passes_of
from burst_portable.profiling.contention import contention
from burst_portable.profiling.evidence import EVIDENCE
from burst_portable.profiling.intervals import intersect, total, union, within
from burst_portable.profiling.matching import Messages, align, match
from burst_portable.profiling.partition import Timeline
from burst_portable.profiling.record import NEVER, RankRecords
from burst_portable.profiling.timeline import events_of
from burst_portable.profiling.traced_facts import traced_facts
from burst_portable.profiling.training import training
from burst_portable.profiling.verdict import losses_of, verdict_of

SCHEMA = "burst_portable.profile/1"


def analyze(records: Sequence[RankRecords], *, skip: int = 0) -> dict[str, Any]:
    """The report's data, see `profiling/README.md`.

    Args:
        records: of every rank, or of one alone: then nothing is known about the other ends of its messages.
        skip: how many of the first training steps to leave out, since they also warm up.
    """
    kept = [_without_first(one, skip) for one in records]
    aligned, clocks = align(kept)
    comparable = clocks.uncertainty_ns is not None and len(aligned) > 1
    messages = match(aligned if comparable else [])
    timelines = {one.rank: timeline_of(one, messages) for one in aligned}
    report: dict[str, Any] = {
        "schema": SCHEMA,
        "device": aligned[0].facts.get("device", "cpu"),
        "light": bool(aligned[0].facts.get("light", False)),
        "transport": aligned[0].facts.get("transport", {"used": "", "direct": ""}),
        "clock": {
            "evidence": aligned[0].evidence,
            "method": clocks.method,
            "uncertainty_ns": clocks.uncertainty_ns,
            "offsets_ns": list(clocks.offsets_ns),
        },
        "drift": [{"rank": one.rank, **one.facts["drift"]} for one in aligned if one.facts.get("drift")],
        "plans": _plans(aligned),
        "ranks": [_rank(one, timelines[one.rank]) for one in aligned],
        "steps": _cut(aligned, timelines, ("backward", "step")),
        "layers": _cut(aligned, timelines, ("call", "backward")),
        "iterations": _cut(aligned, timelines, ("iteration",)),
        "training": training(aligned),
        "links": _links(messages),
        "causes": _causes(aligned, messages) if comparable else [],
        "prediction": _prediction(aligned),
        "peaks": [{"rank": one.rank, **peak} for one in aligned for peak in one.facts.get("peaks", ())],
        "achieved": [row for one in aligned for row in achieved(one, messages)],
        "sensors": _sensors(aligned, clocks.offsets_ns),
        "contention": [row for one in aligned if (row := _contention(one, messages))],
        "traced": [
            {"rank": one.rank, **traced_facts(one.traced, one.table("compute"))} for one in aligned if one.traced
        ],
        "ablation": [{"rank": one.rank, **one.facts["ablation"]} for one in aligned if "ablation" in one.facts],
        "evidence": EVIDENCE,
    }
    report["balance"] = balance(report["ranks"])
    report["losses"] = losses_of(report)
    report["verdict"] = verdict_of(report)
    report["events"] = events_of(aligned, messages)
    return report


def _without_first(one: RankRecords, skip: int) -> RankRecords:
    tables = {kind: table.where(table["iteration"] >= skip) for kind, table in one.tables.items()}
    calls, marked = ([row for row in rows if row[0] >= skip] for rows in (one.calls, one.marked))
    traced = one.traced and replace(one.traced, rows=one.traced.rows[one.traced.rows[:, 0] >= skip])
    return replace(one, tables=tables, calls=calls, marked=marked, traced=traced)


def timeline_of(one: RankRecords, messages: Messages) -> Timeline:
    """A rank's timeline: what it computes, and as much of its communication as was seen."""
    message, collective = one.table("message"), one.table("collective")
    waits = np.concatenate((message.waits(), collective.spans()))
    posts = np.stack((message["posted"], message["left"]), axis=1)[message["posted"] != NEVER]
    seen = messages.known & (messages.target == one.rank)
    transfers = np.stack((messages.ready, messages.arrived), axis=1)[seen]
    comm = np.concatenate((waits, posts, transfers))
    return Timeline.of(one.table("compute").spans(), comm, one.table("copy").spans(), waits)


def _rank(one: RankRecords, timeline: Timeline) -> dict[str, Any]:
    parts = timeline.partition()
    # A pass may end after the window: with a wait that had nothing more to wait for, see `Table.until`.
    window = np.array([timeline.window], dtype=np.int64)
    passes = intersect(union(np.array(passes_of(one), dtype=np.int64).reshape(-1, 2)), window)
    busy = union(np.concatenate((timeline.compute, timeline.comm, timeline.exposed_copy)))
    inside = total(passes) - int(within(busy, passes).sum())
    compute, message, collective = (one.table(kind) for kind in ("compute", "message", "collective"))
    by_pass = {}
    for backward, name in enumerate(PASSES):
        own = compute.where(compute["backward"] == backward)
        by_pass[name] = {"flops": int(own["flops"].sum()), "compute": total(union(own.spans())), "kernels": len(own)}
    sent = message["bytes"][message["sends"] == 1]
    return {
        "rank": one.rank,
        "host": one.host,
        **parts,
        "idle_between_kernels": inside,
        "idle_outside_attention": parts["idle"] - inside,
        "window": [int(x) for x in timeline.window],
        "passes": by_pass,
        "sent_bytes": int(sent.sum() + collective["bytes"].sum()),
        "messages_sent": len(sent),
    }


def _sensors(records: Sequence[RankRecords], offsets: Sequence[int]) -> list[dict[str, Any]]:
    """The sensor readings of each rank's device, on the common clock."""
    found = []
    for one, offset in zip(records, offsets, strict=True):
        told = one.facts.get("sensors", {"reason": "not read", "time": []})
        found.append({"rank": one.rank, **told, "time": [at - offset for at in told["time"]]})
    return found


def _contention(one: RankRecords, messages: Messages) -> dict[str, Any] | None:
    """Kernels beside transfers whose arrival a separate stream watched, compared with the same kernels alone."""
    compute = one.table("compute")
    watched = (messages.receive["arrived"] != NEVER) & ((messages.target == one.rank) | (messages.source == one.rank))
    moved = np.stack((messages.ready, np.maximum(messages.arrived, messages.ready)), axis=1)[watched]
    work = np.stack([compute[name] for name in ("backward", "pairs", "tiles", "flops")], axis=1)
    found = contention(compute.spans(), work, union(moved))
    return found and {"rank": one.rank, **found}


# ------------------------------------------------------------------------------------------------ steps and layers


def _cut(records: Sequence[RankRecords], timelines: dict[int, Timeline], by: tuple[str, ...]) -> list[dict[str, Any]]:
    """Partitions of the windows of every (iteration, call, pass, step), added up by some of these.

    A step's window reaches to the beginning of the next step; the last one's to the end of its pass.
    """
    rows: dict[tuple[int, ...], dict[int, dict[str, int]]] = {}
    for one in records:
        places, windows = step_windows(one)
        if not len(places):
            continue
        index = [("iteration", "call", "backward", "step").index(name) for name in by]
        sizes = timelines[one.rank].measured(windows)
        extra = _work(one, places)
        keys, group = np.unique(places[:, index], axis=0, return_inverse=True)
        count = np.bincount(group)
        for name, values in {**sizes, **extra}.items():
            summed = np.zeros(len(keys), dtype=np.int64)
            np.add.at(summed, group, values)
            for i, key in enumerate(keys.tolist()):
                cell = rows.setdefault(tuple(key), {}).setdefault(one.rank, {"rank": one.rank, "times": int(count[i])})
                cell[name] = int(summed[i])
    return [
        {**dict(zip(by, key, strict=True)), "ranks": [rows[key][rank] for rank in sorted(rows[key])]}
        for key in sorted(rows)
    ]


def step_windows(one: RankRecords) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """(iteration, call, backward, step) of each step that this rank went through, and its window ``[n, 2]``."""
    parts = []
    for kind, table in one.tables.items():
        if not len(table):
            continue
        place = [table[name] for name in ("iteration", "call", "backward", "step")]
        parts.append(np.stack((*place, table["start"], table["end"]), axis=1))
        if kind == "message":
            posted = table.where(table["posted"] != NEVER)
            place = [posted[name] for name in ("iteration", "call", "backward", "issued")]
            parts.append(np.stack((*place, posted["posted"], posted["left"]), axis=1))
    if not parts:
        return np.zeros((0, 4), dtype=np.int64), np.zeros((0, 2), dtype=np.int64)
    every = np.concatenate(parts)
    every = every[np.lexsort(every[:, 4::-1].T)]
    places, first = np.unique(every[:, :4], axis=0, return_index=True)
    begins = np.minimum.reduceat(every[:, 4], first)
    ends = np.maximum.reduceat(every[:, 5], first)
    same_pass = (places[1:, :3] == places[:-1, :3]).all(axis=1)
    stops = ends.copy()
    stops[:-1][same_pass] = begins[1:][same_pass]
    # The end of a pass is the last event of any of its steps.
    change = np.flatnonzero(np.concatenate(([True], ~same_pass)))
    latest = np.maximum.reduceat(ends, change)
    last = np.concatenate((change[1:], [len(places)])) - 1
    stops[last] = latest
    return places, np.stack((begins, np.maximum(stops, begins)), axis=1)


def _work(one: RankRecords, places: NDArray[np.int64]) -> dict[str, NDArray[np.int64]]:
    """FLOPs, pairs and tiles computed, and bytes received, at each place."""
    index = {tuple(place): i for i, place in enumerate(places.tolist())}
    work = {name: np.zeros(len(places), dtype=np.int64) for name in ("flops", "pairs", "tiles", "received_bytes")}
    columns = ("iteration", "call", "backward", "step")
    compute = one.table("compute")
    at = [index[tuple(p)] for p in np.stack([compute[c] for c in columns], axis=1).tolist()]
    for name in ("flops", "pairs", "tiles"):
        np.add.at(work[name], at, compute[name])
    message = one.table("message")
    message = message.where(message["sends"] == 0)
    at = [index[tuple(p)] for p in np.stack([message[c] for c in columns], axis=1).tolist()]
    np.add.at(work["received_bytes"], at, message["bytes"])
    return work


# ------------------------------------------------------------------------------------------------ links and plans


def _links(messages: Messages) -> list[dict[str, Any]]:
    """Each pair of ranks between which messages went, as their receiver saw them."""
    links = []
    pairs = np.stack((messages.source, messages.target), axis=1)
    start, end = messages.receive["start"], messages.receive.until
    arrived = np.clip(messages.ready, start, end)
    for source, target in np.unique(pairs, axis=0).tolist():
        mine = (messages.source == source) & (messages.target == target)
        seen = mine & messages.known
        transfer = int(np.maximum(messages.arrived - messages.ready, 0)[seen].sum())
        seen_bytes = int(messages.receive["bytes"][seen].sum())
        links.append(
            {
                "source": source,
                "target": target,
                "messages": int(mine.sum()),
                "bytes": int(messages.receive["bytes"][mine].sum()),
                "seen": int(seen.sum()),
                "seen_bytes": seen_bytes,
                "transfer": transfer,
                "bytes_per_second": round(seen_bytes * 1e9 / transfer) if transfer > 0 else None,
                "waited_late": int((arrived - start)[mine].sum()),
                "waited_on_its_way": int((end - arrived)[mine].sum()),
            }
        )
    return links


def _causes(records: Sequence[RankRecords], messages: Messages) -> list[dict[str, Any]]:
    found = [
        {"kind": cause.kind, "rank": cause.rank, "peer": cause.peer, "waited": {str(r): ns for r, ns in who.items()}}
        for cause, who in find_causes(records, messages).items()
    ]
    return sorted(found, key=lambda one: -max(one["waited"].values(), default=0))


def _plans(records: Sequence[RankRecords]) -> list[dict[str, Any]]:
    """Each plan that ran, with every rank's part of it."""
    plans = []
    for number in range(max((len(one.plans) for one in records), default=0)):
        having = [one for one in records if number < len(one.plans)]
        plan = {k: v for k, v in having[0].plans[number].items() if k != "planned"}
        plan["calls"] = sum(call[2] == number for call in having[0].calls)
        plan["ranks_planned"] = [{"rank": one.rank, **one.plans[number]["planned"]} for one in having]
        plans.append(plan)
    return plans


def _prediction(records: Sequence[RankRecords]) -> list[dict[str, Any]]:
    """Each pass of each rank: what the plan's cost says, and what was measured, in nanoseconds over all calls."""
    told = []
    for one in records:
        for backward, name in enumerate(PASSES):
            places, windows = step_windows(one)
            mine = places[:, 2] == backward
            measured = int((windows[:, 1] - windows[:, 0])[mine].sum())
            ran = {(int(p[0]), int(p[1])) for p in places[mine].tolist()}
            seconds = sum(
                one.plans[plan]["planned"][name]["seconds"] for i, call, plan in one.calls if (i, call) in ran
            )
            told.append({"rank": one.rank, "pass": name, "predicted": round(seconds * 1e9), "measured": measured})
    return told
