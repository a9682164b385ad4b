"""Recommend what to change about a bottleneck: the layout, the strategy, the transport or the size of messages."""

from __future__ import annotations

from typing import Any

from burst_portable.planning.plans import PASSES
from burst_portable.utils.text import bytes_text

_BETTER = 0.95  # of the present cost: alternatives that save less are not recommended
_LATENCY_BOUND = 0.5  # of a link's planned time: with more latency than this, messages are too small
_SIDES = {"kv": "K and V", "q": "Q and dO", "heads": "heads"}


def advise_layout(report: dict[str, Any]) -> str:
    """Return the recommendation for an uneven plan: the layout that balances it best."""
    plans = [plan for plan in report["plans"] if plan.get("layouts")]
    if not plans:
        return "use layout='zigzag' or 'striped', or 'whole_documents' for packed documents"
    layouts = plans[0]["layouts"]
    best = min(layouts, key=lambda name: layouts[name])
    listed = ", ".join(f"{name} {value:.2g}" for name, value in sorted(layouts.items(), key=lambda one: one[1]))
    return f"use layout={best!r}: its busiest rank has {layouts[best]:.3g} times the mean FLOPs (by layout: {listed})"


def advise_overlap(report: dict[str, Any]) -> str:
    """Return the recommendation for exposed communication: another strategy, transport or message size."""
    texts = [text for text in (_strategy(report), _transport(report), _message_size(report)) if text]
    if texts:
        return "; or ".join(texts)
    plans = report["plans"]
    tried = f"no other strategy sends fewer bytes here than {plans[0]['strategy']}: " if plans else ""
    return f"{tried}give each rank more tokens, so that computing hides the transfers, or use a faster transport"


def advise_contention(report: dict[str, Any]) -> str:
    """Return the recommendation for kernels that communication slows down: a transport that needs no compute units."""
    return _transport(report) or "use a transport whose copies do not run on the compute units, or send fewer bytes"


def _strategy(report: dict[str, Any]) -> str:
    """Return the strategy that is predicted to be no slower and to send fewer bytes; "" if there is none."""
    if not report["plans"]:
        return ""
    plan = report["plans"][0]
    ranks = plan["ranks_planned"]
    keys = ("sent_bytes", "seconds")
    sent, seconds = (max(sum(rank[name][key] for name in PASSES) for rank in ranks) for key in keys)
    alternatives = {
        name: {key: max(rank["alternatives"][name][key] for rank in ranks) for key in keys}
        for name in ranks[0]["alternatives"]
    }
    better = [n for n, o in alternatives.items() if o["sent_bytes"] < _BETTER * sent and o["seconds"] <= seconds]
    if not better:
        return ""
    best = min(better, key=lambda name: (alternatives[name]["seconds"], alternatives[name]["sent_bytes"]))
    text = (
        f"try {best}, which sends {alternatives[best]['sent_bytes'] / sent:.2g} times the bytes of {plan['strategy']}"
    )
    now, then = plan["circulates"], ranks[0]["alternatives"][best].get("circulates", {})
    changed = [name for name in PASSES if then.get(name, now.get(name)) != now.get(name)]
    if changed:
        text += f" ({', '.join(f'{_SIDES.get(then[name], then[name])} circulate {name}' for name in changed)})"
    return text


def _transport(report: dict[str, Any]) -> str:
    """Return a recommendation of the backend's own transport if the run used another one; else ""."""
    used, direct = (report.get("transport") or {}).get("used", ""), (report.get("transport") or {}).get("direct", "")
    if not direct or used == direct:
        return ""
    is_direct = all(plan.get("direct") for plan in report["plans"])
    how = "" if is_direct else ", with each block sent directly by its owner (transfer='direct')"
    return f"try the transport {direct} (BURST_TRANSPORT={direct}) instead of {used}{how}"


def _message_size(report: dict[str, Any]) -> str:
    """Return a recommendation of larger messages if their latency costs more than their bytes; else ""."""
    messages, size = (sum(link[key] for link in report["links"]) for key in ("messages", "bytes"))
    if not messages or not report["plans"]:
        return ""
    plan = report["plans"][0]
    planned = [rank[name] for rank in plan["ranks_planned"] for name in PASSES]
    link, received = (sum(one.get(key, 0.0) for one in planned) for key in ("link_seconds", "received_bytes"))
    if not link or received / (plan["hardware"]["intra_node_bandwidth"] * 1e9) > (1 - _LATENCY_BOUND) * link:
        return ""
    mean = bytes_text(size / messages)
    return f"send larger messages: of {mean} each, latency costs more than bytes; more tokens per rank, or fewer ranks"
