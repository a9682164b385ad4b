"""Compute the data of a report from the records of all ranks: `analyze`.

Times, bytes and FLOPs are integers. `evidence` lists the source of each field.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from burst_portable.planning.plans import PASSES
from burst_portable.profiling.analysis.bottlenecks import find_bottlenecks, whole_time
from burst_portable.profiling.analysis.causes import find_causes, passes_of
from burst_portable.profiling.analysis.efficiency import balance, efficiency
from burst_portable.profiling.analysis.events import events_of
from burst_portable.profiling.analysis.evidence import EVIDENCE
from burst_portable.profiling.analysis.matching import Messages, align, match
from burst_portable.profiling.analysis.summary import add_usual_shares, summarize
from burst_portable.profiling.analysis.trace_summary import trace_summary
from burst_portable.profiling.analysis.train_steps import training
from burst_portable.profiling.event_tables import LOCATION, NEVER, RankRecords
from burst_portable.profiling.intervals import (
    Timeline,
    contention,
    extents,
    intersect,
    measure,
    total,
    union,
    with_unit,
)

SCHEMA = "burst_portable.profile/4"
_MAX_PARTS = 128  # steps of ranks whose bottlenecks are found separately; of more steps, several at once


def analyze(records: Sequence[RankRecords], *, skip: int = 0) -> dict[str, Any]:
    """Return the data of a report without the first `skip` training steps; `profiling/README.md` lists its fields.

    From the records of a single rank, the other ends of its messages are unknown.
    """
    aligned, clocks = align([_steps_of(one, skip) for one in records])
    comparable = clocks.uncertainty_ns is not None and len(aligned) > 1
    messages = match(aligned if comparable else [])
    timelines = {one.rank: _timeline(one, messages) for one in aligned}
    steps = {one.rank: _ring_steps(one, timelines[one.rank]) for one in aligned}
    report: dict[str, Any] = {
        "schema": SCHEMA,
        "device": aligned[0].facts.get("device", "cpu"),
        "backend": aligned[0].facts.get("backend", ""),
        "kernels": list(dict.fromkeys(name for one in aligned for name in one.facts.get("kernels", ()))),
        "level": aligned[0].facts.get("level", "standard"),
        "transport": aligned[0].facts.get("transport", {"used": "", "direct": ""}),
        "clock": {
            "evidence": aligned[0].evidence,
            "method": clocks.method,
            "uncertainty_ns": clocks.uncertainty_ns,
            "offsets_ns": list(clocks.offsets_ns),
        },
        "drift": [{"rank": one.rank, **one.facts["drift"]} for one in aligned if one.facts.get("drift")],
        "plans": _plans(aligned),
        "ring_steps": _cut(steps, ("backward", "ring_step")),
        "layers": _cut(steps, ("attention_call", "backward")),
        "train_steps": _cut(steps, ("train_step",)),
        **_observed(aligned, messages, timelines, comparable=comparable),
        "prediction": _prediction(aligned, steps),
        "peaks": [{"rank": one.rank, **peak} for one in aligned for peak in one.facts.get("peaks", ())],
        "efficiency": [row for one in aligned for row in efficiency(one, messages)],
        "sensors": _sensors(aligned, clocks.offsets_ns),
        "ablation": [{"rank": one.rank, **one.facts["ablation"]} for one in aligned if "ablation" in one.facts],
        "evidence": EVIDENCE,
    }
    report["balance"] = balance(report["ranks"])
    report["bottlenecks"] = find_bottlenecks(report)
    add_usual_shares(report["bottlenecks"], _step_bottlenecks(report, aligned, comparable=comparable))
    report["summary"] = summarize(report)
    report["events"] = events_of(aligned, messages)
    return report


def _observed(
    records: Sequence[RankRecords], messages: Messages, timelines: dict[int, Timeline], *, comparable: bool
) -> dict[str, Any]:
    """Return the parts of a report in which `find_bottlenecks` searches."""
    return {
        "ranks": [_rank(one, timelines[one.rank]) for one in records],
        "training": training(records),
        "links": _links(messages),
        "causes": find_causes(records, messages) if comparable else [],
        "contention": [row for one in records if (row := _contention(one, messages))],
        "kernel_trace": [
            {"rank": one.rank, **trace_summary(one.kernel_trace, one.table("compute"))}
            for one in records
            if one.kernel_trace
        ],
    }


def _step_bottlenecks(
    report: dict[str, Any], records: Sequence[RankRecords], *, comparable: bool
) -> list[tuple[float, list[dict[str, Any]]]]:
    """Return time and bottlenecks of each training step, of several steps at once if there are many."""
    steps = [step["train_step"] for step in report["train_steps"]]
    found = []
    for part in np.array_split(steps, min(len(steps), max(4, _MAX_PARTS // len(records)))) if steps else ():
        chosen = [_steps_of(one, part[0], part[-1]) for one in records]
        messages = match(chosen if comparable else [])
        timelines = {one.rank: _timeline(one, messages) for one in chosen}
        observed = {**report, **_observed(chosen, messages, timelines, comparable=comparable)}
        found.append((whole_time(observed) / len(part), find_bottlenecks(observed)))
    return found


def _steps_of(one: RankRecords, first: int, last: int = NEVER) -> RankRecords:
    """Return the records of training steps `first` to `last`, by default all from `first` on."""

    def within(steps: Any) -> Any:
        return (steps >= first) & (steps <= last) if last != NEVER else steps >= first

    tables = {kind: table.select(within(table["train_step"])) for kind, table in one.tables.items()}
    by_step = one.calls, one.train_steps, one.core_waits
    calls, train_steps, core_waits = ([row for row in rows if within(row[0])] for rows in by_step)
    trace = one.kernel_trace and replace(
        one.kernel_trace, rows=one.kernel_trace.rows[within(one.kernel_trace.rows[:, 0])]
    )
    return replace(one, tables=tables, calls=calls, train_steps=train_steps, core_waits=core_waits, kernel_trace=trace)


def _timeline(one: RankRecords, messages: Messages) -> Timeline:
    """Return a rank's timeline: its kernels, and its communication as far as it was observed."""
    message = one.table("message")
    waits = np.concatenate((message.waits(), one.table("collective").spans()))
    transfers = messages.transfers()[messages.is_observed & (messages.target == one.rank)]
    comm = np.concatenate((waits, message.posts().spans(), transfers))
    return Timeline.of(one.table("compute").spans(), comm, one.table("copy").spans(), waits)


def _rank(one: RankRecords, timeline: Timeline) -> dict[str, Any]:
    parts = timeline.partition()
    # A pass may end after the window, with a wait for a message that had arrived: see `Table.wait_end`.
    window = np.array([timeline.window], dtype=np.int64)
    passes = intersect(union(passes_of(one)), window)
    busy = union(np.concatenate((timeline.compute, timeline.comm, timeline.exposed_copy)))
    inside = total(passes) - int(measure(busy, passes).sum())
    compute, message, collective = (one.table(kind) for kind in ("compute", "message", "collective"))
    by_pass = {}
    for backward, name in enumerate(PASSES):
        own = compute.select(compute["backward"] == backward)
        by_pass[name] = {"flops": int(own["flops"].sum()), "compute_ns": total(union(own.spans())), "kernels": len(own)}
    sent = message["bytes"][message["sends"] == 1]
    records_sends = one.facts.get("level") != "basic"
    return {
        "rank": one.rank,
        "host": one.host,
        **with_unit(parts),
        "idle_between_kernels_ns": inside,
        "idle_outside_attention_ns": parts["idle"] - inside,
        "core_wait_ns": sum(ns for _, ns in one.core_waits) if one.core_waits else None,
        "window_ns": [int(x) for x in timeline.window],
        "passes": by_pass,
        "sent_bytes": int(sent.sum() + collective["bytes"].sum()) if records_sends else None,
        "messages_sent": len(sent) if records_sends else None,
    }


def _sensors(records: Sequence[RankRecords], offsets: Sequence[int]) -> list[dict[str, Any]]:
    """Return the sensor readings of each rank's device, on the common clock."""
    found = []
    for one, offset in zip(records, offsets, strict=True):
        sensors = one.facts.get("sensors", {"reason": "not read", "time_ns": []})
        found.append({"rank": one.rank, **sensors, "time_ns": [at - offset for at in sensors["time_ns"]]})
    return found


def _contention(one: RankRecords, messages: Messages) -> dict[str, Any] | None:
    """Compare kernels during transfers that a separate stream watched with the same kernels in isolation."""
    compute = one.table("compute")
    watched = (messages.receive["arrived"] != NEVER) & ((messages.target == one.rank) | (messages.source == one.rank))
    work = np.stack([compute[name] for name in ("backward", "pairs", "tiles", "flops")], axis=1)
    found = contention(compute.spans(), work, union(messages.transfers()[watched]))
    return found and {"rank": one.rank, **found}


# ------------------------------------------------------------------------------------------------ steps and layers

_Steps = tuple[NDArray[np.int64], dict[str, NDArray[np.int64]]]


def _ring_steps(one: RankRecords, timeline: Timeline) -> _Steps:
    """Return the locations ``[n, 4]`` of a rank's ring steps, and columns of what happened in the window of each.

    The window of a ring step ends where the next one begins; the last one ends with its pass.
    """
    tables = *one.tables.values(), one.table("message").posts()
    locations, _, spans = extents(
        np.concatenate([table.locations for table in tables]), np.concatenate([table.spans() for table in tables])
    )
    _, group, passes = extents(locations[:, :3], spans)
    begins, stops = spans[:, 0], passes[group, 1]
    same_pass = group[1:] == group[:-1]
    stops[:-1][same_pass] = begins[1:][same_pass]
    columns = with_unit(timeline.measure(np.stack((begins, np.maximum(stops, begins)), axis=1)))
    index = {tuple(location): i for i, location in enumerate(locations.tolist())}
    compute, message = one.table("compute"), one.table("message")
    received = message.select(message["sends"] == 0)
    for name, table, column in (
        *((name, compute, name) for name in ("flops", "pairs", "tiles")),
        ("received_bytes", received, "bytes"),
    ):
        columns[name] = np.zeros(len(locations), dtype=np.int64)
        np.add.at(columns[name], [index[tuple(location)] for location in table.locations.tolist()], table[column])
    return locations, columns


def _cut(steps: dict[int, _Steps], by: tuple[str, ...]) -> list[dict[str, Any]]:
    """Return the columns of `_ring_steps` of each rank, summed by some columns of the location."""
    rows: dict[tuple[int, ...], list[dict[str, int]]] = {}
    for rank in sorted(steps):
        locations, columns = steps[rank]
        index = [LOCATION.index(name) for name in by]
        keys, group, count = np.unique(locations[:, index], axis=0, return_inverse=True, return_counts=True)
        sums = {name: np.zeros(len(keys), dtype=np.int64) for name in columns}
        for name, values in columns.items():
            np.add.at(sums[name], group.reshape(-1), values)
        for i, key in enumerate(keys.tolist()):
            cell = {name: int(summed[i]) for name, summed in sums.items()}
            rows.setdefault(tuple(key), []).append({"rank": rank, "count": int(count[i]), **cell})
    return [{**dict(zip(by, key, strict=True)), "ranks": rows[key]} for key in sorted(rows)]


# ------------------------------------------------------------------------------------------------ links and plans


def _links(messages: Messages) -> list[dict[str, Any]]:
    """Return the links between pairs of ranks, as the receivers observed their messages."""
    links = []
    pairs = np.stack((messages.source, messages.target), axis=1)
    start, end = messages.receive["start"], messages.receive.wait_end
    arrived = np.clip(messages.ready, start, end)
    took = np.diff(messages.transfers())[:, 0]
    for source, target in np.unique(pairs, axis=0).tolist():
        on_link = (messages.source == source) & (messages.target == target)
        observed = on_link & messages.is_observed
        transfer = int(took[observed].sum())
        observed_bytes = int(messages.receive["bytes"][observed].sum())
        links.append(
            {
                "source": source,
                "target": target,
                "messages": int(on_link.sum()),
                "bytes": int(messages.receive["bytes"][on_link].sum()),
                "observed_messages": int(observed.sum()),
                "observed_bytes": observed_bytes,
                "transfer_ns": transfer,
                "bytes_per_second": round(observed_bytes * 1e9 / transfer) if transfer > 0 else None,
                "sender_wait_ns": int((arrived - start)[on_link].sum()),
                "transfer_wait_ns": int((end - arrived)[on_link].sum()),
            }
        )
    return links


def _plans(records: Sequence[RankRecords]) -> list[dict[str, Any]]:
    """Return each plan that ran, with the part of every rank."""
    plans = []
    for number in range(max((len(one.plans) for one in records), default=0)):
        having = [one for one in records if number < len(one.plans)]
        plan = {k: v for k, v in having[0].plans[number].items() if k != "planned"}
        plan["calls"] = sum(call[2] == number for call in having[0].calls)
        plan["ranks_planned"] = [{"rank": one.rank, **one.plans[number]["planned"]} for one in having]
        plans.append(plan)
    return plans


def _prediction(records: Sequence[RankRecords], steps: dict[int, _Steps]) -> list[dict[str, Any]]:
    """Return the predicted and the measured time of each pass of each rank, in nanoseconds over all calls."""
    rows = []
    for one in records:
        locations, columns = steps[one.rank]
        for backward, name in enumerate(PASSES):
            in_pass = locations[:, 2] == backward
            measured = int(columns["span_ns"][in_pass].sum())
            ran = set(map(tuple, locations[in_pass, :2].tolist()))
            seconds = sum(
                one.plans[plan]["planned"][name]["seconds"] for i, call, plan in one.calls if (i, call) in ran
            )
            rows.append({"rank": one.rank, "pass": name, "predicted_ns": round(seconds * 1e9), "measured_ns": measured})
    return rows
