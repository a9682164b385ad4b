"""What to change, by kind of loss: layout, strategy, side, transport, or how much a message carries."""

from __future__ import annotations

from typing import Any

from burst_portable.plans import PASSES
from burst_portable.units import bytes_text

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


def layout(report: Report) -> str:
    """Where the plan is uneven: the layout that spreads it best."""
    plans = [plan for plan in report["plans"] if plan.get("layouts")]
    if not plans:
        return "spread the sequence with layout='zigzag' or 'striped', for packed documents 'whole_documents'"
    told = plans[0]["layouts"]
    best = min(told, key=lambda name: told[name])
    others = ", ".join(f"{name} {value:.2g}" for name, value in sorted(told.items(), key=lambda one: one[1]))
    return f"take layout={best!r}: its busiest rank has {told[best]:.3g} times the mean FLOPs (by layout: {others})"


def exposed(report: Report) -> str:
    """Where blocks on their way hold everybody up: the strategy and side, then the transport, then larger messages."""
    told = [text for text in (_strategy(report), _transport(report), _chunk(report)) if text]
    return "; or ".join(told) if told else f"{_none_better(report)}{MORE_TOKENS}, or look for a faster transport"


def beside(report: Report) -> str:
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
    how = "" if straight else ", with blocks straight from their owners (moves='fetch')"
    return f"try the transport {direct} (BURST_TRANSPORT={direct}) in place of {used}{how}"


def _chunk(report: Report) -> str:
    """Where messages are so small that their latency costs more than their bytes."""
    messages, size = (sum(link[key] for link in report["links"]) for key in ("messages", "bytes"))
    if not messages or not report["plans"]:
        return ""
    plan = report["plans"][0]
    planned = [rank[name] for rank in plan["ranks_planned"] for name in PASSES]
    link, received = (sum(one.get(key, 0.0) for one in planned) for key in ("link_seconds", "received"))
    if not link or received / (plan["rates"]["gbps"] * 1e9) > (1 - _LATENCY) * link:
        return ""
    mean = bytes_text(size / messages)
    return f"send larger messages: of {mean} each, latency costs more than bytes; more tokens per rank, or fewer ranks"
