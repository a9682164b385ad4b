"""How each number of a report is known: from events, from a trace, from the plan, or as an estimate.

Events are marks of a clock around what ran: the host's where calls return when they are done, else the device's.
"""

from __future__ import annotations

from collections.abc import Mapping

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
        *("memory", "received", "tflops", "gbps"),
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
