"""Find the bottlenecks of a profile: how much time each costs, its cause, and what to change.

The lost time of a bottleneck is the wall-clock time by which the run would be shorter without it, as far as one session
shows. Bottlenecks of different kinds may overlap, so their times do not add up.
"""

from __future__ import annotations

from bisect import bisect_left
from statistics import median
from typing import Any

from burst_portable.planning.plans import PASSES
from burst_portable.profiling.analysis.recommendations import advise_contention, advise_layout, advise_overlap
from burst_portable.profiling.intervals import largest_contention
from burst_portable.utils.text import scaled, time_text

Report = dict[str, Any]
Bottleneck = dict[str, Any]

_WAITED_FOR = 0.25  # of a slow rank's excess: if other ranks waited at least this share, all of the excess counts
_THROTTLED = 0.95  # of the other ranks' clock
_OUTLIER = 2.0  # times the median: waits for a slow link, bytes per second of a slow link, waits for a late rank

BOTH_ENDS = "events: both ends of each message"


def find_bottlenecks(report: Report) -> list[Bottleneck]:
    """Return all bottlenecks, the largest first."""
    span = whole_time(report)
    finders = _slow_ranks, _uneven_plan, _links, _agreement, _late_ranks, _host_gaps, _late_launches, _contention
    found = [one for find in finders for one in find(report)]
    if report["level"] == "basic" or not report["causes"]:
        found += _waiting(report)
    for one in found:
        one["share"] = one["lost_ns"] / span if span else 0.0
    return sorted((one for one in found if one["lost_ns"] > 0), key=lambda one: -one["lost_ns"])


def whole_time(report: Report) -> float:
    """Return the time of which bottlenecks are shares: the training steps, or the longest span if it is longer."""
    steps = report["training"]["steps"] if report["training"] else ()
    marked = sum(max(rank["duration_ns"] for rank in step["ranks"]) for step in steps)
    return float(max(marked, *(rank["span_ns"] for rank in report["ranks"])))


def make_bottleneck(
    kind: str, lost: float, text: str, recommendation: str, evidence: str, rank: int = -1, peer: int = -1
) -> Bottleneck:
    """Return a bottleneck. `rank` and `peer`: A rank, or the two ends of a link; -1 for all ranks."""
    return {
        "kind": kind,
        "rank": rank,
        "peer": peer,
        "lost_ns": round(lost),
        "text": text,
        "recommendation": recommendation,
        "evidence": evidence,
    }


def _slow_ranks(report: Report) -> list[Bottleneck]:
    """Find ranks whose kernels take longer than the same FLOPs take on the other ranks."""
    found = []
    launch_delays = _launch_delays(report)
    for rank in report["ranks"]:
        excess = took = 0.0
        for name in PASSES:
            measured = rank["passes"][name]
            others = [r["passes"][name] for r in report["ranks"] if r is not rank]
            rates = [o["compute_ns"] / o["flops"] for o in others if o["flops"]]
            if measured["flops"] and rates:
                excess += measured["compute_ns"] - measured["flops"] * median(rates)
                took += measured["compute_ns"]
        number = rank["rank"]
        excess -= max(0, launch_delays.get(number, 0))  # the device was idle in this time
        if excess <= 0.05 * took:
            continue
        ratio = took / (took - excess) if took > excess else 0.0
        times = f"{ratio:.0f}" if ratio >= 9.5 else f"{ratio:.2g}"
        text = f"rank {number} computes slowly: its kernels take {times} times as long as the same FLOPs elsewhere"
        longest = _waited_for(report, number)
        text += _clock(report, number)
        text += f", and other ranks wait up to {time_text(longest)} for it" if longest else ""
        recommendation = (
            f"check rank {number}: other processes on its device or cores, clocks, temperature, another model of "
            "device (a larger share of the work, if the plan assigns it one, is not counted here)"
        )
        # No rank waits for the end of the last pass. An excess that no rank waited for cost nothing.
        lost = excess if longest > _WAITED_FOR * excess else longest
        found.append(make_bottleneck("slow rank", lost, text, recommendation, "events: kernels; plan: FLOPs", number))
    return found


def _clock(report: Report, rank: int) -> str:
    """Return a remark if the sensors show a lower clock on a rank's device than on others; else ""."""
    clocks = {one["rank"]: median(one["megahertz"]) for one in report.get("sensors", ()) if one.get("megahertz")}
    others = [clock for other, clock in clocks.items() if other != rank]
    if rank not in clocks or not others or clocks[rank] >= _THROTTLED * median(others):
        return ""
    return f" (its device runs at {clocks[rank]:.0f} MHz, others at {median(others):.0f})"


def _uneven_plan(report: Report) -> list[Bottleneck]:
    """Find work that the plan itself distributes unevenly."""
    lost, largest_ratio, busiest = 0.0, 1.0, -1
    for name in PASSES:
        work = [(r["passes"][name]["flops"], r["passes"][name]["compute_ns"], r["rank"]) for r in report["ranks"]]
        total = sum(flops for flops, _, _ in work)
        if total and len(work) > 1:
            largest, _, rank = max(work)
            mean = total / len(work)
            # At the median rank's speed: the extra time of a slow rank is another bottleneck.
            lost += (largest - mean) * median(time / flops for flops, time, _ in work if flops)
            if largest / mean > largest_ratio:
                largest_ratio, busiest = largest / mean, rank
    if largest_ratio < 1.02:
        return []
    layout = report["plans"][0]["layout"] if report["plans"] else "this layout"
    text = f"the plan is uneven: rank {busiest} has {largest_ratio:.2g} times the mean FLOPs (layout: {layout})"
    return [make_bottleneck("uneven plan", lost, text, advise_layout(report), "plan: FLOPs; events: kernels", busiest)]


def _links(report: Report) -> list[Bottleneck]:
    """Find transfers that ranks wait for: on one slow link, or on all links."""
    waits = {(c["rank"], c["peer"]): max(c["wait_ns"].values()) for c in report["causes"] if c["kind"] == "link"}
    times = {(pair := (link["source"], link["target"])): waits.get(pair, 0) for link in report["links"]}
    found, ranks = [], len(report["ranks"])
    slow, usual = None, 1.0
    if len(times) > 1:
        pair, worst = max(times.items(), key=lambda one: one[1])
        rest = median(t for p, t in times.items() if p != pair)
        if worst > _OUTLIER * rest and _is_slower(report, pair):
            source, target = pair
            text = f"the link from rank {source} to rank {target} is slow: {link_speeds_text(report, pair)}"
            recommendation = (
                f"check the path from rank {source} to rank {target} (topology, other traffic, the network between "
                "them); until it is fixed, order the ranks so that fewer bytes use it, or try another strategy"
            )
            found.append(make_bottleneck("slow link", worst - rest, text, recommendation, BOTH_ENDS, source, target))
            slow, usual = pair, rest / worst
    # Waits for the slow link count as its own bottleneck, except for the time that a usual link would take.
    total = sum(
        sum(c["wait_ns"].values()) * (usual if (c["rank"], c["peer"]) == slow else 1.0)
        for c in report["causes"]
        if c["kind"] in ("link", "collective")
    )
    text = "communication is exposed: ranks wait for blocks that are being transferred"
    found.append(make_bottleneck("communication", total / max(1, ranks), text, advise_overlap(report), BOTH_ENDS))
    return found


def _agreement(report: Report) -> list[Bottleneck]:
    """Find the time of the check that all ranks make the same call, after the last rank arrived."""
    total = sum(sum(c["wait_ns"].values()) for c in report["causes"] if c["kind"] == "agreement")
    text = "ranks wait while they check whether they make the same call"
    recommendation = (
        "the check runs once per pass and costs the same for messages of any size: make fewer calls with more tokens "
        "each, and check whether processes share cores, because each rank answers only when it is scheduled"
    )
    return [make_bottleneck("agreement", total / max(1, len(report["ranks"])), text, recommendation, BOTH_ENDS)]


def _speeds(report: Report, pair: tuple[int, int]) -> tuple[float | None, list[float]]:
    """Return the bytes per second of a link and of the other links; None and left out if not observed."""
    speeds = {(link["source"], link["target"]): link["bytes_per_second"] for link in report["links"]}
    return speeds[pair], [speed for other, speed in speeds.items() if other != pair and speed]


def _is_slower(report: Report, pair: tuple[int, int]) -> bool:
    """Return whether a link transfers fewer bytes per second than other links, or its rate is unknown.

    A long wait alone does not show a slow link: its receiver may have been early, or may have had more to receive.
    """
    speed, others = _speeds(report, pair)
    return not speed or not others or _OUTLIER * speed < median(others)


def link_speeds_text(report: Report, pair: tuple[int, int]) -> str:
    """Return the rates of a slow link and of the other links as text."""
    speed, others = _speeds(report, pair)
    if not speed:
        return "its rate was not observed"
    more = f", others {scaled(median(others), 'B/s')}" if others else ""
    return f"it transfers {scaled(speed, 'B/s')}{more}"


def _late_ranks(report: Report) -> list[Bottleneck]:
    """Find ranks that enter attention late because they run more outside of it: one rank, or each in turn.

    A rank may be late because attention took longer on it before: by its kernels, its host or a link. Only the excess
    of its time outside of attention is lost there.
    """
    ranks = {rank["rank"]: rank for rank in report["ranks"]}
    outside = _excess(_outside(report))
    busy = [_excess({r: one[part] for r, one in ranks.items()}) for part in ("compute_ns", "idle_between_kernels_ns")]
    delayed = _excess({rank: _waits_of(report, rank) for rank in ranks})
    found, unexplained, waits = [], {}, _waits(report, "outside")
    for rank, by_waiting in waits.items():
        text = f"rank {rank} enters attention late: other ranks wait while it runs work outside of attention"
        recommendation = f"check what rank {rank} does between attention calls: data loading, uneven layers, logging"
        lost = min(outside[rank], _waited_for(report, rank))
        found.append(make_bottleneck("late rank", lost, text, recommendation, BOTH_ENDS, rank))
        explained = sum(max(0, excess[rank]) for excess in (outside, delayed, *busy))
        longest = max(by_waiting.values())
        unexplained[rank] = max(0, longest - explained) / longest
    lost = max(sum(unexplained[rank] * by.get(str(one), 0) for rank, by in waits.items()) for one in ranks)
    text = "ranks enter attention at different times, each late in turn by work outside of attention"
    recommendation = "check what delays all ranks between attention calls, such as other work on the host"
    return [*found, make_bottleneck("late ranks", lost, text, recommendation, BOTH_ENDS)]


def _outside(report: Report) -> dict[int, float]:
    """Return each rank's time outside of attention: in marked steps with the time before and after their events."""
    if not report["training"]:
        return {rank["rank"]: rank["idle_outside_attention_ns"] for rank in report["ranks"]}
    times = dict.fromkeys((rank["rank"] for rank in report["ranks"]), 0.0)
    for row in (row for step in report["training"]["steps"] for row in step["ranks"]):
        times[row["rank"]] += row["duration_ns"] - row["attention_ns"]
    return times


def _excess(values: dict[int, float]) -> dict[int, float]:
    """Return how much larger each rank's value is than the median of the other ranks; 0 for a single rank."""
    ordered, last = sorted(values.values()), len(values) - 1
    if not last:
        return dict.fromkeys(values, 0.0)
    # The two middle values of the other ranks: those after the value itself move down by one.
    low, high = (last - 1) // 2, last // 2
    found = {}
    for rank, value in values.items():
        at = bisect_left(ordered, value)
        found[rank] = value - (ordered[low + (at <= low)] + ordered[high + (at <= high)]) / 2
    return found


def _host_gaps(report: Report) -> list[Bottleneck]:
    """Find time inside of attention in which ranks neither compute nor wait: on one rank, or on all."""
    gaps = {rank["rank"]: rank["idle_between_kernels_ns"] for rank in report["ranks"]}
    found, (rank, excess) = [], max(_excess(gaps).items(), key=lambda one: one[1])
    if gaps[rank] > _OUTLIER * (gaps[rank] - excess):
        text = f"the host of rank {rank} is slow: other ranks wait while it neither computes nor waits in attention"
        recommendation = f"check what else runs on the cores of rank {rank}"
        lost = min(excess, _waited_for(report, rank))
        found.append(make_bottleneck("slow host", lost, text, recommendation, BOTH_ENDS, rank))
        gaps[rank] -= excess
    text = "time between kernels: ranks are in attention, and neither compute nor wait"
    recommendation = (
        "kernel launches, packing and merging take a large share of the time: give each rank more tokens, or use fewer "
        "steps"
    )
    lost = sum(gaps.values()) / len(gaps)
    return [*found, make_bottleneck("host", lost, text, recommendation, "events: time without any event")]


def _late_launches(report: Report) -> list[Bottleneck]:
    """Find devices that wait between two marks for a kernel launch: the marks count this time as computing."""
    delays = _launch_delays(report)
    if not delays:
        return []
    rank = max(delays, key=lambda one: delays[one])
    text = f"the host of rank {rank} launches kernels late: its device waits for them"
    recommendation = (
        "tracing slows hosts: check whether level='standard' takes as long; if it does, give each rank more tokens, or "
        "use fewer steps"
    )
    evidence = "events: kernels' marks; trace: kernels"
    return [make_bottleneck("late launches", delays[rank], text, recommendation, evidence, rank)]


def _launch_delays(report: Report) -> dict[int, int]:
    """Return the compute time by marks minus that in the device's trace, by rank; {} without a trace of a device."""
    marked = {rank["rank"]: rank["compute_ns"] for rank in report["ranks"]}
    traced = {one["rank"]: one["partition"]["compute_ns"] for one in report["kernel_trace"] if one["partition"]}
    return {rank: marked[rank] - took for rank, took in traced.items()}


def _contention(report: Report) -> list[Bottleneck]:
    """Find kernels that take longer during transfers."""
    found = largest_contention(report)
    if found is None or found["ratio"] <= 1.0:
        return []
    text = (
        f"kernels are slower during communication: on rank {found['rank']} they take {found['ratio']:.2f} times as long"
    )
    evidence = "trace: overlapped and isolated kernels" if report["kernel_trace"] else "events: kernels, and transfers"
    return [make_bottleneck("contention", found["lost_ns"], text, advise_contention(report), evidence, found["rank"])]


def _waiting(report: Report) -> list[Bottleneck]:
    """Find waits in a report that has only one end of each message."""
    lost = sum(rank["blocking_ns"] for rank in report["ranks"]) / max(1, len(report["ranks"]))
    text = "ranks wait for other ranks; the cause is unknown, because only one end of each message was recorded"
    recommendation = (
        "gather all ranks (session.report() on every rank) at level='standard' to find the late rank or link"
    )
    return [make_bottleneck("waiting", lost, text, recommendation, "events: waits of one end")]


def _waited_for(report: Report, rank: int) -> int:
    """Return the longest time that another rank waited for a rank, whatever that did at the time."""
    by_kind = [_waits(report, kind).get(rank, {}) for kind in ("compute", "host", "outside")]
    return max(sum(waits.get(str(one["rank"]), 0) for waits in by_kind) for one in report["ranks"])


def _waits_of(report: Report, rank: int) -> int:
    """Return the time that a rank waited for links and collectives."""
    kinds = ("link", "collective", "agreement")
    return sum(c["wait_ns"].get(str(rank), 0) for c in report["causes"] if c["kind"] in kinds)


def _waits(report: Report, kind: str) -> dict[int, dict[str, int]]:
    """Return the waits that each rank caused in one way: nanoseconds by waiting rank, by causing rank."""
    return {c["rank"]: c["wait_ns"] for c in report["causes"] if c["kind"] == kind}
