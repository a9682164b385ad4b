"""What was lost, to whom, and what to change; the largest first, in sentences.

A loss is wall-clock time that the run would have been shorter by, as far as one session can tell; losses of different
kinds may overlap, so they do not add up.
"""

from __future__ import annotations

from statistics import median
from typing import Any

from burst_portable.planning.plans import PASSES
from burst_portable.profiling.intervals import contended
from burst_portable.utils.text import bytes_text, percent, scaled, time_text

_BETTER = 0.95  # of the present cost: an alternative that saves less is not worth naming
_LATENCY = 0.5  # of a link's planned time: with more latency than this, messages are too small
_SIDES = {"kv": "K and V", "q": "Q and dO", "heads": "heads"}
MORE_TOKENS = "give each rank more tokens, so that computing hides the blocks"
AGREEMENT = (
    "it is asked once per pass and costs the same whatever the messages carry: make fewer calls with more tokens each, "
    "and look whether processes share cores, for then each answers only when its turn comes"
)
OUTSIDE = (
    "look at a whole step with torch.profiler; outside of attention lie the rest of the model, the optimizer and the "
    "program, which this profile does not record: some is expected, and more where processes share cores"
)

Report = dict[str, Any]


def advise_layout(report: Report) -> str:
    """Where the plan is uneven: the layout that spreads it best."""
    plans = [plan for plan in report["plans"] if plan.get("layouts")]
    if not plans:
        return "spread the sequence with layout='zigzag' or 'striped', for packed documents 'whole_documents'"
    told = plans[0]["layouts"]
    best = min(told, key=lambda name: told[name])
    others = ", ".join(f"{name} {value:.2g}" for name, value in sorted(told.items(), key=lambda one: one[1]))
    return f"take layout={best!r}: its busiest rank has {told[best]:.3g} times the mean FLOPs (by layout: {others})"


def advise_overlap(report: Report) -> str:
    """Where blocks on their way hold everybody up: the strategy and side, then the transport, then larger messages."""
    told = [text for text in (_strategy(report), _transport(report), _chunk(report)) if text]
    return "; or ".join(told) if told else f"{_none_better(report)}{MORE_TOKENS}, or look for a faster transport"


def advise_contention(report: Report) -> str:
    """Where kernels are slower beside communication: a transport that does not run where they do."""
    return _transport(report) or "take a transport whose copies do not run on the units that compute, or fewer bytes"


def _strategy(report: Report) -> str:
    """The strategy that is predicted to be faster and sends less, with the side that it moves instead."""
    if not report["plans"]:
        return ""
    plan = report["plans"][0]
    ranks = plan["ranks_planned"]
    sent, seconds = (max(sum(rank[name][key] for name in PASSES) for rank in ranks) for key in ("sent", "seconds"))
    others = {
        name: {key: max(rank["alternatives"][name][key] for rank in ranks) for key in ("sent", "seconds")}
        for name in ranks[0]["alternatives"]
    }
    better = [n for n, o in others.items() if o["sent"] < _BETTER * sent and o["seconds"] <= seconds]
    if not better:
        return ""
    best = min(better, key=lambda name: (others[name]["seconds"], others[name]["sent"]))
    text = f"try {best}, which sends {others[best]['sent'] / sent:.2g} times the bytes of {plan['strategy']}"
    travels = ranks[0]["alternatives"][best].get("travels", {})
    changed = [name for name in PASSES if travels.get(name, plan["travels"].get(name)) != plan["travels"].get(name)]
    if changed:
        text += f" ({', '.join(f'{_SIDES.get(travels[name], travels[name])} travel {name}' for name in changed)})"
    return text


def _none_better(report: Report) -> str:
    plans = report["plans"]
    return f"no other strategy sends fewer bytes here than {plans[0]['strategy']}: " if plans else ""


def _transport(report: Report) -> str:
    """The transport of the backend's own, where another one ran."""
    used, direct = (report.get("transport") or {}).get("used", ""), (report.get("transport") or {}).get("direct", "")
    if not direct or used == direct:
        return ""
    straight = all(plan.get("direct") for plan in report["plans"])
    how = "" if straight else ", with blocks straight from their owners (transfer='direct')"
    return f"try the transport {direct} (BURST_TRANSPORT={direct}) in place of {used}{how}"


def _chunk(report: Report) -> str:
    """Where messages are so small that their latency costs more than their bytes."""
    messages, size = (sum(link[key] for link in report["links"]) for key in ("messages", "bytes"))
    if not messages or not report["plans"]:
        return ""
    plan = report["plans"][0]
    planned = [rank[name] for rank in plan["ranks_planned"] for name in PASSES]
    link, received = (sum(one.get(key, 0.0) for one in planned) for key in ("link_seconds", "received"))
    if not link or received / (plan["hardware"]["intra_node_bandwidth"] * 1e9) > (1 - _LATENCY) * link:
        return ""
    mean = bytes_text(size / messages)
    return f"send larger messages: of {mean} each, latency costs more than bytes; more tokens per rank, or fewer ranks"


_WORTH = 0.03  # of a rank's time: smaller losses are not worth a verdict
_MUCH = 0.2  # of all ranks' time: this much idle outside of attention is reported, though attention does not cause it
_HEARD = 0.25  # of a slow rank's excess: if others waited at least this share for it, all of it counts
_THROTTLED = 0.95  # of the other ranks' clock
_STANDS_OUT = 2.0  # times the median: waits for a slow link, the rate of the others, waits for a late rank

BOTH_ENDS = "events: both ends of each message"
Loss = dict[str, Any]


def losses_of(report: dict[str, Any]) -> list[Loss]:
    """Everything that was lost, the largest first."""
    span = max((rank["span"] for rank in report["ranks"]), default=0)
    found = [
        *_slow_ranks(report),
        *_uneven(report),
        *_links(report),
        *_agreement(report),
        *_late(report),
        *_host_gaps(report),
        *_late_launches(report),
        *_contention(report),
    ]
    if report["light"] or not report["causes"]:
        found += _blocked(report)
    for loss in found:
        loss["share"] = loss["lost"] / span if span else 0.0
    return sorted((loss for loss in found if loss["lost"] > 0), key=lambda loss: -loss["lost"])


def verdict_of(report: dict[str, Any]) -> dict[str, Any]:
    """The largest loss as one sentence, and what to do; or that there is none worth naming, and where the time went."""
    losses = report["losses"]
    outside = _share(report, "idle_outside_attention")
    if losses and losses[0]["share"] >= _WORTH:
        worst = losses[0]
        text = f"{worst['text']}: {time_text(worst['lost'])} lost, {percent(worst['share'])} of the time."
        if outside > max(_MUCH, worst["share"]):
            text += f" {percent(outside)} is idle outside of attention, which this profile does not look into."
        return {**worst, "text": text[0].upper() + text[1:]}
    copies = _share(report, "exposed_copy")
    text = (
        f"No large loss in attention: {percent(_share(report, 'compute'))} of the time it computes, "
        f"{percent(_share(report, 'exposed_comm'))} is exposed communication, "
        f"{f'{percent(copies)} exposed copies, ' if copies else ''}"
        f"{percent(_share(report, 'idle_between_kernels'))} idle between kernels, {percent(outside)} idle outside of "
        "attention."
    )
    advice = OUTSIDE if outside > _MUCH else ""
    return {
        "kind": "none", "rank": -1, "peer": -1, "lost": 0, "share": 0.0, "text": text, "advice": advice, "evidence": "",
    }  # fmt: skip


def _share(report: dict[str, Any], part: str) -> float:
    """The share of all ranks' time that a part of the partition takes."""
    span, took = (sum(rank[key] for rank in report["ranks"]) for key in ("span", part))
    return took / span if span else 0.0


def _loss(kind: str, lost: float, text: str, advice: str, evidence: str, rank: int = -1, peer: int = -1) -> Loss:
    return {
        "kind": kind, "rank": rank, "peer": peer, "lost": round(lost), "text": text, "advice": advice,
        "evidence": evidence,
    }  # fmt: skip


def _slow_ranks(report: dict[str, Any]) -> list[Loss]:
    """Ranks whose kernels take longer than the same FLOPs take on the others."""
    found = []
    waited, late = _waited(report, "compute"), _launched_late(report)
    for rank in report["ranks"]:
        excess = took = 0.0
        for name in PASSES:
            mine, others = rank["passes"][name], [r["passes"][name] for r in report["ranks"] if r is not rank]
            hardware = [o["compute"] / o["flops"] for o in others if o["flops"]]
            if mine["flops"] and hardware:
                excess += mine["compute"] - mine["flops"] * median(hardware)
                took += mine["compute"]
        number = rank["rank"]
        excess -= max(0, late.get(number, 0))  # its device stood, and did not compute
        if excess <= 0.05 * took:
            continue
        times = took / (took - excess) if took > excess else 0.0
        text = (
            f"rank {number} computes slowly: its kernels take {_times(times)} times as long as the same FLOPs elsewhere"
        )
        most = max(waited.get(number, {}).values(), default=0)
        text += _clock(report, number)
        text += f", and others wait up to {time_text(most)} for it" if most else ""
        advice = (
            f"look at rank {number}: other processes on its device or cores, clocks, temperature, another model of "
            "device (a larger share of the work, if the plan gives it one, is not counted in this)"
        )
        # What the last pass took too long nobody waited for any more; what nobody waited for at all cost nothing.
        lost = excess if most > _HEARD * excess else most
        found.append(_loss("slow rank", lost, text, advice, "events: kernels; plan: FLOPs", number))
    return found


def _clock(report: dict[str, Any], rank: int) -> str:
    """A remark that a rank's device ran at a lower clock than others, if its sensors say so; else ""."""
    clocks = {one["rank"]: median(one["megahertz"]) for one in report.get("sensors", ()) if one.get("megahertz")}
    others = [clock for other, clock in clocks.items() if other != rank]
    if rank not in clocks or not others or clocks[rank] >= _THROTTLED * median(others):
        return ""
    return f" (its device runs at {clocks[rank]:.0f} MHz, others at {median(others):.0f})"


def _times(ratio: float) -> str:
    return f"{ratio:.0f}" if ratio >= 9.5 else f"{ratio:.2g}"


def _uneven(report: dict[str, Any]) -> list[Loss]:
    """Work that the plan itself spreads unevenly."""
    lost, most, worst = 0.0, 1.0, -1
    for name in PASSES:
        own = [(r["passes"][name]["flops"], r["passes"][name]["compute"], r["rank"]) for r in report["ranks"]]
        flops = sum(o[0] for o in own)
        if flops and len(own) > 1:
            largest, _, rank = max(own)
            mean = flops / len(own)
            # At the middle rank's speed: what a slow rank takes longer is a loss of its own.
            lost += (largest - mean) * median(time / work for work, time, _ in own if work)
            if largest / mean > most:
                most, worst = largest / mean, rank
    if most < 1.02:
        return []
    layout = report["plans"][0]["layout"] if report["plans"] else "this layout"
    text = f"the plan is uneven: rank {worst} has {most:.2g} times the mean FLOPs (layout: {layout})"
    return [_loss("uneven plan", lost, text, advise_layout(report), "plan: FLOPs; events: kernels", worst)]


def _links(report: dict[str, Any]) -> list[Loss]:
    """Bytes on their way while a rank stands still: one slow link, or communication as such."""
    waited = {(c["rank"], c["peer"]): max(c["waited"].values()) for c in report["causes"] if c["kind"] == "link"}
    known = [(link["source"], link["target"]) for link in report["links"]]
    times = {pair: waited.get(pair, 0) for pair in known}
    found, ranks = [], len(report["ranks"])
    slow, usual = None, 1.0
    if times:
        pair, worst = max(times.items(), key=lambda one: one[1])
        rest = median(t for p, t in times.items() if p != pair) if len(times) > 1 else 0.0
        if len(times) > 1 and worst > _STANDS_OUT * rest and _brings_less(report, pair):
            excess = worst - rest
            source, target = pair
            text = f"the link from rank {source} to rank {target} is slow: {link_speeds_text(report, pair)}"
            advice = (
                f"look at the way from rank {source} to rank {target} (topology, other traffic, the network between "
                "them); until then order the ranks so that fewer bytes take it, or try another strategy"
            )
            found.append(_loss("slow link", excess, text, advice, BOTH_ENDS, source, target))
            slow, usual = pair, rest / worst
    # Everybody's waits for the slow link are its own loss, but for what a link like the others would have cost.
    on_way = sum(
        sum(c["waited"].values()) * (usual if (c["rank"], c["peer"]) == slow else 1.0)
        for c in report["causes"]
        if c["kind"] in ("link", "collective")
    )
    everywhere = on_way / max(1, ranks)
    text = "communication is exposed: ranks stand still while blocks are on their way"
    found.append(_loss("communication", everywhere, text, advise_overlap(report), BOTH_ENDS))
    return found


def _agreement(report: dict[str, Any]) -> list[Loss]:
    """All ranks are there, and still ask each other whether they make the same call."""
    asked = sum(sum(c["waited"].values()) for c in report["causes"] if c["kind"] == "agreement")
    text = "ranks stand still while they ask each other whether they make the same call"
    return [_loss("agreement", asked / max(1, len(report["ranks"])), text, AGREEMENT, BOTH_ENDS)]


def _brings_less(report: dict[str, Any], pair: tuple[int, int]) -> bool:
    """Whether a link that is waited for longest is slow as well, where its transfers and others' were seen: ranks also
    wait longer for a link like the others, for its receiver was early or had more to come."""
    speeds = {(link["source"], link["target"]): link["bytes_per_second"] for link in report["links"]}
    others = [s for p, s in speeds.items() if p != pair and s]
    return not speeds[pair] or not others or _STANDS_OUT * speeds[pair] < median(others)


def link_speeds_text(report: dict[str, Any], pair: tuple[int, int]) -> str:
    """Return the rates of a slow link and of the others as text."""
    speeds = {(link["source"], link["target"]): link["bytes_per_second"] for link in report["links"]}
    others = [s for p, s in speeds.items() if p != pair and s]
    if not speeds[pair]:
        return "how fast it is was not seen"
    mine = scaled(speeds[pair], "B/s")
    return f"it brings {mine}, others {scaled(median(others), 'B/s')}" if others else f"it brings {mine}"


def _late(report: dict[str, Any]) -> list[Loss]:
    """Ranks that the others wait for while they do something else: one, or now this and now that."""
    waited = _waited(report, "outside")
    late = {rank["rank"]: max(waited.get(rank["rank"], {}).values(), default=0) for rank in report["ranks"]}
    found = []
    for rank, most in late.items():
        rest = [lost for other, lost in late.items() if other != rank]
        if rest and most > _STANDS_OUT * median(rest):
            text = f"rank {rank} came late to attention: others wait for it while it does something else"
            advice = f"look at what rank {rank} does between attentions: data loading, uneven layers, logging"
            found.append(_loss("late rank", most, text, advice, BOTH_ENDS, rank))
    if found or not waited:
        return found
    most = max(sum(who.get(str(rank), 0) for who in waited.values()) for rank in late)
    text = "ranks come to attention at different times, now this one late and now that one"
    advice = "no rank stands out: look at what disturbs them all between attentions, such as other work on the host"
    return [_loss("late ranks", most, text, advice, BOTH_ENDS)]


def _host_gaps(report: dict[str, Any]) -> list[Loss]:
    """A rank that is in an attention, and neither in a kernel nor waiting."""
    gaps = [rank["idle_between_kernels"] for rank in report["ranks"]]
    text = "time between kernels: ranks are in attention, and neither compute nor wait"
    advice = "launching, packing and merging cost more than they should: give each rank more tokens, or fewer steps"
    return [_loss("host", sum(gaps) / max(1, len(gaps)), text, advice, "events: what nothing else took")]


def _late_launches(report: dict[str, Any]) -> list[Loss]:
    """A device that waits at a kernel's mark until the host has launched the kernel, which marks count as computing."""
    late = _launched_late(report)
    if not late:
        return []
    rank = max(late, key=lambda one: late[one])
    text = f"the host of rank {rank} is late: its device stands at the marks of kernels that are not launched yet"
    advice = (
        "tracing slows hosts: see whether level='session' takes as long; if it does, give each rank more tokens, or "
        "fewer steps"
    )
    return [_loss("late launches", late[rank], text, advice, "events: kernels' marks; trace: kernels", rank)]


def _launched_late(report: dict[str, Any]) -> dict[int, int]:
    """By rank, how much longer marks say that it computes than its tracer saw kernels run; {} where no device was."""
    marked = {rank["rank"]: rank["compute"] for rank in report["ranks"]}
    traced = {one["rank"]: one["partition"]["compute"] for one in report["traced"] if one["partition"]}
    return {rank: marked[rank] - took for rank, took in traced.items()}


def _contention(report: dict[str, Any]) -> list[Loss]:
    """Kernels that take longer while something is transferred."""
    found = contended(report)
    if found is None or found["ratio"] <= 1.0:
        return []
    text = (
        f"kernels are slower beside communication: on rank {found['rank']} they take {found['ratio']:.2f} times as long"
    )
    known = "trace: kernels beside communication and alone" if report["traced"] else "events: kernels, and transfers"
    return [_loss("contention", found["lost"], text, advise_contention(report), known, found["rank"])]


def _blocked(report: dict[str, Any]) -> list[Loss]:
    """Where the other ends of messages are not known: only that ranks wait."""
    lost = sum(rank["blocking"] for rank in report["ranks"]) / max(1, len(report["ranks"]))
    text = "ranks stand still, waiting for others; whose fault it is, this session cannot tell"
    advice = "gather all ranks (session.report() on every rank) at level='session' to see who is late"
    return [_loss("waiting", lost, text, advice, "events: waits of one end")]


def _waited(report: dict[str, Any], kind: str) -> dict[int, dict[str, int]]:
    return {c["rank"]: c["waited"] for c in report["causes"] if c["kind"] == kind}
