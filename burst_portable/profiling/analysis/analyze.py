"""From records to the report's data: partitions of ranks, steps, layers and training steps, links, causes, verdict.

Times, bytes and FLOPs are whole numbers; how each is known stands in `evidence`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import NDArray

from burst_portable.planning.plans import PASSES
from burst_portable.profiling.analysis.achieved import achieved, balance
from burst_portable.profiling.analysis.causes import find_causes, passes_of
from burst_portable.profiling.analysis.matching import Messages, align, match
from burst_portable.profiling.analysis.verdict import losses_of, verdict_of
from burst_portable.profiling.intervals import Timeline, contention, intersect, total, union, within
from burst_portable.profiling.records import NEVER, RankRecords, Table
from burst_portable.profiling.tracing import traced_facts
from burst_portable.utils.text import percent, time_text

LANE_KINDS = ("compute", "wait", "post", "collective", "transfer", "copy")
COLUMNS = ("kind", "start", "duration", "iteration", "call", "backward", "step", "a", "b", "work")
"""`a`, `b`: owners of queries and keys (compute), peer and owner (wait, transfer), else -1. `work`: FLOPs or bytes."""


def events_of(records: Sequence[RankRecords], messages: Messages) -> dict[str, Any]:
    """Every rank's events in the order of their starts; nanoseconds since `origin`."""
    rows = {one.rank: _rank_lane(one, messages) for one in records}
    origin = min((int(r[:, 1].min()) for r in rows.values() if len(r)), default=0)
    ranks = []
    for one in records:
        data = rows[one.rank]
        data[:, 1] -= origin
        data = data[np.argsort(data[:, 1], kind="stable")]
        ranks.append({"rank": one.rank, **{name: data[:, i].tolist() for i, name in enumerate(COLUMNS)}})
    return {"origin": origin, "kinds": list(LANE_KINDS), "ranks": ranks}


def _rank_lane(one: RankRecords, messages: Messages) -> NDArray[np.int64]:
    compute, message, collective, copy = (one.table(k) for k in ("compute", "message", "collective", "copy"))
    parts = [_rows("compute", compute, compute["q_owner"], compute["k_owner"], compute["flops"])]
    waits = message["start"], message.until
    parts.append(_rows("wait", message, message["peer"], message["owner"], message["bytes"], waits))
    none = np.full(len(collective), -1)
    parts.append(_rows("collective", collective, none, none, collective["bytes"]))
    none = np.full(len(copy), -1)
    parts.append(_rows("copy", copy, none, none, none * 0))
    posted = message.where(message["posted"] != NEVER)
    if len(posted):  # one span for all that was posted together
        _, first = np.unique(posted["posted"], return_index=True)
        posted = posted.where(first)
        none = np.full(len(posted), -1)
        times = posted["posted"], posted["left"]
        parts.append(_rows("post", posted, none, none, none * 0, times, posted["issued"]))
    came = (messages.target == one.rank) & messages.known
    receive = messages.receive.where(came)
    times = messages.ready[came], np.maximum(messages.arrived, messages.ready)[came]
    parts.append(_rows("transfer", receive, receive["peer"], receive["owner"], receive["bytes"], times))
    return np.concatenate(parts)


def _rows(kind: str, table: Table, a: Any, b: Any, work: Any, times: Any = None, step: Any = None) -> NDArray[np.int64]:
    start, end = (table["start"], table["end"]) if times is None else times
    place = table["iteration"], table["call"], table["backward"], table["step"] if step is None else step
    return np.stack((np.full(len(table), LANE_KINDS.index(kind)), start, end - start, *place, a, b, work), axis=1)


KINDS = ("events", "trace", "plan", "ablation", "estimate")

_TOLD: Mapping[str, tuple[str, ...]] = {
    "events: from the first mark of a rank to its last": ("span", "window"),
    "events: marks around each kernel call": ("compute", "kernels"),
    "events: marks around each wait and each collective": ("blocking", "waited_late", "waited_on_its_way"),
    "events: waits, posts, collectives, and transfers whose arrival was seen; a transfer that was over before anyone "
    "waited is in nobody's way and not counted": ("comm", "exposed_comm", "overlap"),
    "events: marks around messages that are packed and gradients that are added up": ("exposed_copy",),
    "events: from one mark of a training step to the next, all of it": ("shortest", "median", "longest", "duration"),
    "events: the time of training steps that lies in passes of attention, from each pass's first mark to its last": (
        *("attention", "longest_attention", "attention_share"),
    ),
    "events: what no mark covers": ("idle", "idle_between_kernels", "idle_outside_attention"),
    "events: from when both ends had posted until a stream that watched for it, or the waiting receiver, had it; where "
    "neither did, only an upper bound is known": ("transfer", "bandwidth", "bytes_per_second", "seen", "seen_bytes"),
    "events: both ends of each message on one clock, followed to what the late rank did": ("waited",),
    "events: differences of the times above": ("lost", "share", "measured"),
    "events: kernels beside communication against the same kernels alone; at the deep level, by the trace": (
        *("beside", "alone", "ratio"),
    ),
    "events: the clocks of several hosts, aligned on messages": ("uncertainty_ns", "offsets_ns"),
    "events: an anchor of the device's clock to the host's at each end of the session": ("ppm", "uncertainty_ppm"),
    "events: the device's own sensors, read ten times a second": (
        *("watts", "megahertz", "celsius", "joules", "sensors"),
    ),
    "events: FLOPs of the plan over marked time": ("flop_rate",),
    "trace: the vendor's own tracer, joined by the launching call": ("time",),
    "ablation: the host's clock around a step with attention's messages off, its kernels off, and both, the shortest "
    "of some runs each; and differences of these": (
        *("whole", "without_communication", "without_computing", "without_both"),
        *("exposed_communication", "exposed_computing", "hidden"),
    ),
    "plan: exact mask area, and the bytes of the buffers that were sent": (
        *("flops", "pairs", "tiles", "bytes", "sent", "sent_bytes", "received_bytes", "messages", "messages_sent"),
        *("planned_sent", "planned", "layouts"),
    ),
    "plan: FLOPs over the bytes of each row read or written once": ("intensity",),
    "estimate: the plan's cost at the rates that `plans` names; it knows no contention and no slow neighbour": (
        *("predicted", "planned_flop_rate", "planned_bandwidth", "seconds", "compute_seconds", "link_seconds"),
        *("memory", "received", "tflops", "intra_node_bandwidth"),
    ),
    "estimate: the vendor's data sheet, or a short measurement on this machine, as the peak's source says": (
        *("peak", "memory_bandwidth"),
    ),
    "estimate: the roofline, min(peak, intensity x memory bandwidth), and what of it was reached": (
        "ceiling",
        "of_ceiling",
    ),
}

EVIDENCE: dict[str, str] = {", ".join(names): text for text, names in _TOLD.items()}
"""Fields of the report, comma-separated -> how they are known, the kind first."""


def evidence_of(field: str) -> str:
    """How the numbers of a field are known; "" for a field that counts or names."""
    return next((text for text, names in _TOLD.items() if field in names), "")


def training(records: Sequence[RankRecords]) -> dict[str, Any] | None:
    """The steps that were marked, with attention in them, and the shortest, middle and longest; None without any.

    A step takes as long as it takes the rank that takes longest.
    """
    steps: dict[int, list[dict[str, int]]] = {}
    for one in records:
        for iteration, row in _of_rank(one):
            steps.setdefault(iteration, []).append(row)
    if not steps:
        return None
    took = {iteration: max(ranks, key=lambda row: row["duration"]) for iteration, ranks in sorted(steps.items())}
    longest = max(took, key=lambda iteration: took[iteration]["duration"])
    durations = [row["duration"] for row in took.values()]
    every = [row for ranks in steps.values() for row in ranks]
    whole, inside = (sum(row[name] for row in every) for name in ("duration", "attention"))
    return {
        "shortest": min(durations),
        "median": round(median(durations)),
        "longest": took[longest]["duration"],
        "longest_step": longest,
        "longest_rank": took[longest]["rank"],
        "longest_attention": took[longest]["attention"],
        "attention_share": inside / whole if whole else 0.0,
        "steps": [{"iteration": iteration, "ranks": steps[iteration]} for iteration in took],
    }


def _of_rank(one: RankRecords) -> list[tuple[int, dict[str, int]]]:
    """(training step, its row) of each that was marked and has attention: marks may stand around other things too."""
    having = {int(i) for table in one.tables.values() for i in np.unique(table["iteration"])}
    marked = [row for row in one.marked if row[0] in having]
    windows = np.array([row[1:] for row in marked], dtype=np.int64).reshape(-1, 2)
    passes = union(np.array(passes_of(one), dtype=np.int64).reshape(-1, 2))
    return [
        (row[0], {"rank": one.rank, "duration": row[2] - row[1], "attention": int(inside)})
        for row, inside in zip(marked, within(passes, windows), strict=True)
    ]


def training_text(data: dict[str, Any]) -> str:
    """How long training steps took, in a sentence; "" where none was marked."""
    if not (told := data.get("training")):
        return ""
    count, longest, rank = len(told["steps"]), told["longest"], told["longest_rank"]
    of_longest = percent(told["longest_attention"] / longest if longest else 0.0)
    if count == 1:
        return f"training step {told['longest_step']} took {time_text(longest)}, {of_longest} of it attention"
    return (
        f"{count} training steps: shortest {time_text(told['shortest'])}, median {time_text(told['median'])}, longest "
        f"{time_text(longest)} (step {told['longest_step']}, counted from 0, on rank {rank}); attention "
        f"takes {of_longest} of the longest, {percent(told['attention_share'])} of all"
    )


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
