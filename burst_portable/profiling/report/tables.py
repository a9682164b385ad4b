"""Make the tables and sentences that the terminal, Markdown and HTML forms of a report share."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

from burst_portable.planning.plans import PASSES
from burst_portable.profiling.analysis.train_steps import training_text
from burst_portable.profiling.intervals import FIELDS
from burst_portable.utils.text import bytes_text, percent, scaled, time_text

NAMES = {
    "compute": "computing",
    "exposed_comm": "exposed communication",
    "exposed_copy": "exposed copies",
    "idle": "idle",
    "overlap": "overlap",
    "blocking": "blocking",
    "shortest_step": "shortest training step",
    "median_step": "median training step",
    "longest_step": "longest training step",
}
BASIC = "a report at level basic: copies, hidden communication and bytes sent are not recorded"
_STEP_PARTS = ("span", "compute", "exposed_comm", "exposed_copy", "idle", "blocking")
_SHOWN = ("span", "compute", "exposed_comm", "exposed_copy", "blocking", "idle")
_BOTTLENECKS = {
    "communication": "communication exposed",
    "agreement": "checking that ranks agree",
    "host": "gaps between kernels",
    "late launches": "kernels launched late",
    "contention": "kernels slowed by communication",
    "none": "no large bottleneck",
}


def bottleneck_name(kind: str) -> str:
    """Return the displayed name of a kind of bottleneck."""
    return _BOTTLENECKS.get(kind, kind)


ABLATED = {
    "full_step_ns": "a step",
    "exposed_communication_ns": "messages add",
    "exposed_computing_ns": "kernels add",
    "hidden_ns": "hidden",
    "without_both_ns": "the rest",
}
"""Columns of an ablation: a step is the sum of the other four."""


def ablation_text(data: dict[str, Any]) -> str:
    """Return the ablation of the rank with the longest step as a sentence; "" without an ablation."""
    if not data["ablation"]:
        return ""
    one = max(data["ablation"], key=lambda row: row["full_step_ns"])
    hidden = one["hidden_ns"]
    return (
        f"of a step of {time_text(one['full_step_ns'])} on rank {one['rank']}, "
        f"attention's messages {_added(one['exposed_communication_ns'])}, "
        f"its kernels {_added(one['exposed_computing_ns'])}, "
        f"{time_text(abs(hidden))} {'are hidden' if hidden >= 0 else 'of these go away with either'}, "
        f"and the rest takes {time_text(one['without_both_ns'])}"
    )


def _added(difference: int) -> str:
    """Return an added time as text. A difference below zero is within the variation between runs."""
    return f"add {time_text(difference)}" if difference > 0 else "add no measurable time"


def drift_text(data: dict[str, Any]) -> str:
    """Return the largest drift of a device's clock and whether times are corrected; "" for host clocks."""
    if not data["drift"]:
        return ""
    worst = max(data["drift"], key=lambda row: abs(row["ppm"]))
    corrected = "corrected" if worst["corrected"] else f"not corrected: uncertain by {worst['uncertainty_ppm']:.2g}"
    return f"device clocks drift by up to {abs(worst['ppm']):.2g} ppm, {corrected}"


def step_rows(data: dict[str, Any]) -> list[dict[str, Any]]:
    """Return a row per ring step of a pass: means over ranks of a mean call.

    The slowest rank is the one that computes longest: a rank that waits long is not slow.
    """
    rows = []
    for one in data["ring_steps"]:
        ranks = one["ranks"]
        names = *(f"{part}_ns" for part in _STEP_PARTS), "received_bytes", "tiles"
        calls = {name: [r[name] / r["count"] for r in ranks] for name in names}
        longest = max(calls["compute_ns"])
        compute = sum(r["compute_ns"] for r in ranks)
        rows.append(
            {
                "pass": PASSES[one["backward"]],
                "step": one["ring_step"],
                "count": max(r["count"] for r in ranks),
                **{name.removesuffix("_ns"): sum(values) / len(ranks) for name, values in calls.items()},
                "slowest": ranks[calls["compute_ns"].index(longest)]["rank"] if longest else "-",
                "slowest_compute": longest,
                "longest_wait": max(calls["blocking_ns"]),
                "flops_per_second": sum(r["flops"] for r in ranks) * 1e9 / compute if compute else 0.0,
            }
        )
    return rows


def totals(data: dict[str, Any]) -> dict[str, int]:
    """Return sums over all ranks: times in nanoseconds, `sent_bytes`, and `flops`."""
    ranks = data["ranks"]
    times = (*FIELDS, "idle_outside_attention")
    return {
        **{name: sum(rank[f"{name}_ns"] for rank in ranks) for name in times},
        "sent_bytes": sum(rank["sent_bytes"] or 0 for rank in ranks),
        "flops": sum(one["flops"] for rank in ranks for one in rank["passes"].values()),
    }


def layer_rows(data: dict[str, Any]) -> list[dict[str, Any]]:
    """Return a row per layer (attention call of a training step) and pass: sums over steps, means over ranks."""
    rows = []
    for one in data["layers"]:
        ranks, names = one["ranks"], ("span", "compute", "exposed_comm", "blocking", "idle")
        means = {name: sum(r[f"{name}_ns"] for r in ranks) / len(ranks) for name in names}
        rows.append({"layer": one["attention_call"], "pass": PASSES[one["backward"]], **means})
    return rows


def prediction_rows(data: dict[str, Any]) -> list[dict[str, Any]]:
    """Return predicted and measured time of each pass of a rank; `longest` is the common scale of all rows."""
    predictions = enumerate(data["prediction"])
    rows = [{**one, "index": i} for i, one in predictions if one["measured_ns"] and one["predicted_ns"]]
    longest = max((max(r["predicted_ns"], r["measured_ns"]) for r in rows), default=1) or 1
    return [{**row, "longest": longest} for row in rows]


def roofline_text(row: dict[str, Any]) -> str:
    """Return the fraction of the roofline that a row of `efficiency` reached, as text."""
    if row["ceiling_fraction"] is None:
        return "unknown"
    ceiling = scaled(row["ceiling_flops_per_second"], "FLOP/s")
    return f"{percent(row['ceiling_fraction'])} of {ceiling} ({row['bound']} bound)"


def peaks_text(data: dict[str, Any]) -> list[str]:
    """Return the devices' peaks and their sources, a line per kind of device and dtype."""
    kinds: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for one in data["peaks"]:
        source = f"measured: {one['source']}" if one["measured"] else one["source"]
        kinds.setdefault((one["device"] or "device", one["dtype"], source), []).append(one)
    return [
        f"{device}, {dtype}: {_range(ones, 'flops', 'FLOP/s')}, memory {_range(ones, 'bandwidth', 'B/s')} ({source})"
        for (device, dtype, source), ones in kinds.items()
    ]


def hardware_text(data: dict[str, Any]) -> list[str]:
    """Return the hardware that predictions assume and its source. It is often a guess, and never an upper bound."""
    lines = []
    for hardware in (plan["hardware"] for plan in data["plans"]):
        source = hardware.get("source", "")
        shown = f" ({source})" if isinstance(source, str) and source and source.isprintable() else ""
        flops = scaled(hardware["tflops"] * 1e12, "FLOP/s")
        bandwidth = scaled(hardware["intra_node_bandwidth"] * 1e9, "B/s")
        lines.append(f"{flops} and {bandwidth} per rank{shown}")
    return list(dict.fromkeys(lines))


def _range(ones: list[dict[str, Any]], key: str, unit: str) -> str:
    """Return the smallest and the largest value of all ranks; "unknown" if one has none."""
    values = [one[key] for one in ones]
    if None in values:
        return "FLOP/s unknown" if key == "flops" else "unknown"
    low, high = scaled(min(values), unit), scaled(max(values), unit)
    return low if low == high else f"{low} to {high}"


def kernel_rows(data: dict[str, Any]) -> list[dict[str, Any]]:
    """Return a row per traced kernel and pass, over all ranks and steps, the longest first."""
    rows: dict[tuple[str, int, str], dict[str, Any]] = {}
    for one in data["kernel_trace"]:
        for k in one["kernels"]:
            new = {
                "name": k["name"],
                "pass": PASSES[k["backward"]],
                "kind": k["kind"],
                "count": 0,
                "time": 0,
                "most": k,
            }
            row = rows.setdefault((k["name"], k["backward"], k["kind"]), new)
            row["count"] += k["count"]
            row["time"] += k["time_ns"]
            if k["time_ns"] > row["most"]["time_ns"]:
                row["most"] = k
    return sorted(rows.values(), key=lambda r: -r["time"])


class TextTable(NamedTuple):
    """A table of text. The columns of `left` contain text, others numbers."""

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    left: Collection[int] = (0,)


def rank_table(data: dict[str, Any], columns: Sequence[str], limit: int) -> TextTable:
    """Return the partition of each rank; `columns` are the headers."""
    rows = [
        [
            str(rank["rank"]),
            *(
                "-" if data["level"] == "basic" and name == "exposed_copy" else time_text(rank[f"{name}_ns"])
                for name in _SHOWN
            ),
        ]
        for rank in data["ranks"][:limit]
    ]
    return TextTable(columns, rows, left=())


def ablation_table(data: dict[str, Any], limit: int) -> TextTable:
    """Return the parts of an ablated step of each rank."""
    rows = [[f"rank {r['rank']}", *(time_text(r[name]) for name in ABLATED)] for r in data["ablation"][:limit]]
    return TextTable(("ablation", *ABLATED.values()), rows)


def efficiency_table(data: dict[str, Any], limit: int, roofline: Callable[[dict[str, Any]], str]) -> TextTable:
    """Return measured and planned rates of each pass of a rank; `roofline` formats the last column."""
    rows = [
        [
            f"rank {r['rank']} {r['pass']}",
            *(scaled(r[key], "FLOP/s") if r[key] else "-" for key in ("flops_per_second", "planned_flops_per_second")),
            "-" if r["sent_bytes"] is None else bytes_text(r["sent_bytes"]),
            bytes_text(r["planned_sent_bytes"]),
            roofline(r),
        ]
        for r in data["efficiency"][: len(PASSES) * limit]
    ]
    return TextTable(("efficiency", "in kernels", "planned", "sent", "planned", "of the roofline"), rows)


_MAX_RANKS = 32
_MAX_BOTTLENECKS = 5


def markdown(data: dict[str, Any]) -> str:
    """Return summary, partition and bottlenecks as GitHub's Markdown."""
    summary = data["summary"]
    parts = [f"**{_escape(bottleneck_name(summary['kind']).capitalize())}.** {_escape(summary['text'])}"]
    if summary["recommendation"]:
        parts.append(f"What to do: {_escape(summary['recommendation'])}.")
    names = "rank", *(NAMES.get(name, name) for name in _SHOWN)
    parts.append(_markdown_table(rank_table(data, names, _MAX_RANKS)))
    if (more := len(data["ranks"]) - _MAX_RANKS) > 0:
        parts.append(f"And {more} ranks more.")
    if text := training_text(data):
        parts.append(f"{text[0].upper()}{text[1:]}.")
    if data["level"] == "basic":
        parts.append(f"This is {BASIC}; copies count as idle.")
    if data["ablation"]:
        parts.append(_markdown_table(ablation_table(data, _MAX_RANKS)))
    if data["efficiency"]:
        parts.append(_markdown_table(efficiency_table(data, _MAX_RANKS, roofline_text)))
        parts += [f"Planned for {_escape(line)}." for line in hardware_text(data)]
        parts += [f"Peaks of {_escape(line)}." for line in peaks_text(data)]
    if data["bottlenecks"]:
        found = data["bottlenecks"][:_MAX_BOTTLENECKS]
        rows = [(time_text(one["lost_ns"]), percent(one["share"]), one["text"]) for one in found]
        parts.append(_markdown_table(TextTable(("lost", "of the run", "bottleneck"), rows, left=(2,))))
    return "\n\n".join(parts) + "\n"


def _markdown_table(table: TextTable) -> str:
    rule = ["---" if index in table.left else "---:" for index in range(len(table.columns))]
    rows = table.columns, rule, *([_escape(cell) for cell in row] for row in table.rows)
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _escape(text: str) -> str:
    """Return a text of a report as one line of Markdown without tags, links, mentions or formatting."""
    # An underscore within a word is no formatting.
    special = r"[\\`*{}\[\]<>|~#&$]|(?<![^\W_])_|_(?![^\W_])"
    text = re.sub(special, r"\\\g<0>", " ".join(text.split()))
    return text.replace("://", ":\\//").replace("www.", "www\\.").replace("@", "@<!-- -->")
