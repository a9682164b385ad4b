"""Compute the data of a report from records: partitions, links, causes, efficiency, bottlenecks, events.

Times, bytes and FLOPs are integers. `evidence` lists the source of each field.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import NDArray

from burst_portable.planning.plans import PASSES
from burst_portable.profiling.analysis.bottlenecks import (
    add_usual_shares,
    find_bottlenecks,
    summarize,
    whole_time,
)
from burst_portable.profiling.analysis.causes import find_causes, passes_of
from burst_portable.profiling.analysis.efficiency import balance, efficiency
from burst_portable.profiling.analysis.matching import Messages, align, match
from burst_portable.profiling.event_tables import LOCATION, NEVER, RankRecords, Table
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
from burst_portable.profiling.tracing import trace_summary
from burst_portable.utils.text import percent, time_text

LANE_KINDS = ("compute", "wait", "post", "collective", "transfer", "copy")
COLUMNS = ("kind", "start_ns", "duration_ns", "train_step", "attention_call", "backward", "ring_step", "a", "b", "work")
"""Columns of events. `a`, `b`: owners of queries and keys (compute), peer and owner (wait, transfer), else -1.
`work`: FLOPs or bytes."""


def events_of(records: Sequence[RankRecords], messages: Messages) -> dict[str, Any]:
    """Return every rank's events in the order of their starts, in nanoseconds since `origin_ns`."""
    rows = {one.rank: _rank_events(one, messages) for one in records}
    origin = min((int(r[:, 1].min()) for r in rows.values() if len(r)), default=0)
    ranks = []
    for one in records:
        data = rows[one.rank]
        data[:, 1] -= origin
        data = data[np.argsort(data[:, 1], kind="stable")]
        ranks.append({"rank": one.rank, **{name: data[:, i].tolist() for i, name in enumerate(COLUMNS)}})
    return {"origin_ns": origin, "kinds": list(LANE_KINDS), "ranks": ranks}


def _rank_events(one: RankRecords, messages: Messages) -> NDArray[np.int64]:
    compute, message, collective, copy = (one.table(k) for k in ("compute", "message", "collective", "copy"))
    posts = message.posts()
    _, first = np.unique(posts["start"], return_index=True)  # messages that were posted together are one event
    posts = posts.select(first)
    observed = (messages.target == one.rank) & messages.is_observed
    received, transfers = messages.receive.select(observed), messages.transfers()[observed]
    return np.concatenate(
        (
            _rows("compute", compute, compute.spans(), "q_owner", "k_owner", "flops"),
            _rows("wait", message, message.waits(), "peer", "owner", "bytes"),
            _rows("collective", collective, collective.spans(), work="bytes"),
            _rows("copy", copy, copy.spans()),
            _rows("post", posts, posts.spans()),
            _rows("transfer", received, transfers, "peer", "owner", "bytes"),
        )
    )


def _rows(
    kind: str, table: Table, spans: NDArray[np.int64], a: str = "", b: str = "", work: str = ""
) -> NDArray[np.int64]:
    """Return rows of `COLUMNS`; `a`, `b` and `work` name columns of the table."""
    start, end = spans.T
    owners = (table[name] if name else -1 for name in (a, b))
    columns = LANE_KINDS.index(kind), start, end - start, *table.locations.T, *owners, table[work] if work else 0
    return np.stack(np.broadcast_arrays(*columns), axis=1)


EVIDENCE = {
    "span_ns, window_ns": "events: from the first mark of a rank to its last",
    "compute_ns, kernels": "events: marks around each kernel call",
    "blocking_ns, sender_wait_ns, transfer_wait_ns": "events: marks around each wait and each collective",
    "comm_ns, exposed_comm_ns, overlap_ns": "events: waits, posts, collectives, and transfers with an observed "
    "arrival; a transfer that ended before any rank waited for it is not counted",
    "exposed_copy_ns": "events: marks around the packing of messages and the addition of gradients",
    "shortest_ns, median_ns, longest_ns, duration_ns": "events: from one mark of a training step to the next",
    "attention_ns, longest_attention_ns, attention_share": "events: the part of training steps in passes of attention, "
    "from each pass's first mark to its last",
    "idle_ns, idle_between_kernels_ns, idle_outside_attention_ns": "events: time without any event",
    "transfer_ns, bytes_per_second, observed_messages, observed_bytes": "events: from the time when both ends had "
    "posted to the arrival, as a watching stream or the waiting receiver observed it; otherwise only an upper bound is "
    "known",
    "wait_ns": "events: both ends of each message on one clock, followed to the activity of the late rank",
    "lost_ns, share, usual_share, spread, standard_error, measured, measured_ns": "events: differences of the times "
    "above",
    "core_wait_ns": "events: the scheduler's count of time in which threads of the process could run and had no core",
    "overlapped, isolated, ratio": "events: kernels during communication against the same kernels in isolation; at "
    "level kernels, by the trace",
    "uncertainty_ns, offsets_ns": "events: the clocks of several hosts, aligned on messages",
    "ppm, uncertainty_ppm": "events: an anchor of the device's clock to the host's at each end of the session",
    "watts, megahertz, celsius, joules, sensors": "events: the device's own sensors, read ten times per second",
    "flops_per_second": "events: FLOPs of the plan over marked time",
    "time_ns": "trace: the vendor's own tracer, joined by the launching call",
    "full_step_ns, without_communication_ns, without_computing_ns, without_both_ns, exposed_communication_ns, "
    "exposed_computing_ns, hidden_ns": "ablation: the host's clock around a step without attention's messages, without "
    "its kernels, and without both, the shortest of several runs each; and differences of these",
    "flops, pairs, tiles, bytes, sent_bytes, received_bytes, messages, messages_sent, planned_sent_bytes, planned, "
    "layouts": "plan: exact mask area, and the bytes of the buffers that were sent",
    "flops_per_byte": "plan: FLOPs over the bytes of each row read or written once",
    "predicted_ns, planned_flops_per_second, planned_bytes_per_second, seconds, compute_seconds, link_seconds, "
    "memory_bytes, tflops, intra_node_bandwidth": "estimate: the plan's cost on the hardware that `plans` names, "
    "without contention and without slow ranks",
    "peak_flops_per_second, memory_bytes_per_second": "estimate: the vendor's data sheet, or a short measurement on "
    "this machine, as the peak's source says",
    "ceiling_flops_per_second, ceiling_fraction": "estimate: the roofline, min(peak, FLOPs per byte x memory "
    "bandwidth), and the fraction that was reached",
}
"""Fields of the report, comma-separated -> how they are known, the kind first."""


def evidence_of(field: str) -> str:
    """Return how the numbers of a field are known; "" for a field that counts or names."""
    return next((text for names, text in EVIDENCE.items() if field in names.split(", ")), "")


def training(records: Sequence[RankRecords]) -> dict[str, Any] | None:
    """Return the marked steps that contain attention, and the shortest, median and longest; None without any.

    The duration of a step is that of its slowest rank.
    """
    steps: dict[int, list[dict[str, int]]] = {}
    for one in records:
        for step, row in _train_steps(one):
            steps.setdefault(step, []).append(row)
    if not steps:
        return None
    slowest = {step: max(ranks, key=lambda row: row["duration_ns"]) for step, ranks in sorted(steps.items())}
    durations = {step: row["duration_ns"] for step, row in slowest.items()}
    longest = max(durations, key=durations.__getitem__)
    every = [row for ranks in steps.values() for row in ranks]
    total_ns, attention_ns = (sum(row[name] for row in every) for name in ("duration_ns", "attention_ns"))
    return {
        "shortest_ns": min(durations.values()),
        "median_ns": round(median(durations.values())),
        "longest_ns": durations[longest],
        "longest_step": longest,
        "longest_rank": slowest[longest]["rank"],
        "longest_attention_ns": slowest[longest]["attention_ns"],
        "attention_share": attention_ns / total_ns if total_ns else 0.0,
        "steps": [{"train_step": step, "ranks": steps[step]} for step in slowest],
    }


def _train_steps(one: RankRecords) -> list[tuple[int, dict[str, int]]]:
    """Return (train step, its row) of each marked step that contains attention; other marked steps are left out."""
    with_attention = {int(i) for table in one.tables.values() for i in np.unique(table["train_step"])}
    marked = [row for row in one.train_steps if row[0] in with_attention]
    windows = np.array([row[1:] for row in marked], dtype=np.int64).reshape(-1, 2)
    passes = union(passes_of(one))
    return [
        (row[0], {"rank": one.rank, "duration_ns": row[2] - row[1], "attention_ns": int(inside)})
        for row, inside in zip(marked, measure(passes, windows), strict=True)
    ]


def training_text(data: dict[str, Any]) -> str:
    """Return the durations of training steps as a sentence; "" if none was marked."""
    if not (training := data["training"]):
        return ""
    count, longest, rank = len(training["steps"]), training["longest_ns"], training["longest_rank"]
    of_longest = percent(training["longest_attention_ns"] / longest if longest else 0.0)
    if count == 1:
        step = f"training step {training['longest_step']}, counted from 0,"
        return f"{step} took {time_text(longest)}, {of_longest} of it attention"
    return (
        f"{count} training steps: shortest {time_text(training['shortest_ns'])}, median "
        f"{time_text(training['median_ns'])}, longest {time_text(longest)} (step {training['longest_step']}, counted "
        f"from 0, on rank {rank}); attention takes {of_longest} of the longest, "
        f"{percent(training['attention_share'])} of all"
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
