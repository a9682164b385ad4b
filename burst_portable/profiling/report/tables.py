"""Rows of the tables that terminal, Markdown and HTML show alike."""

from __future__ import annotations

from typing import Any

from burst_portable.planning.plans import PASSES
from burst_portable.profiling.analysis.analyze import training_text
from burst_portable.utils.text import percent, scaled, time_text

NAMES = {
    "compute": "computing",
    "exposed_comm": "exposed communication",
    "exposed_copy": "exposed copies",
    "idle": "idle",
    "overlap": "overlap",
    "blocking": "blocking",
    "shortest_step": "shortest whole step",
    "median_step": "median whole step",
    "longest_step": "longest whole step",
}
LIGHT = "a light report: copies, hidden communication and bytes sent are not recorded"
_STEP_PARTS = ("span", "compute", "exposed_comm", "exposed_copy", "idle", "blocking", "overlap")
_LOSSES = {
    "slow rank": "slow rank",
    "slow link": "slow link",
    "uneven plan": "uneven plan",
    "communication": "communication exposed",
    "agreement": "asking whether ranks agree",
    "late rank": "late rank",
    "late ranks": "ranks late in turn",
    "host": "gaps between kernels",
    "late launches": "kernels launched late",
    "contention": "kernels slowed by communication",
    "waiting": "waiting",
    "none": "no large loss",
}


def loss_name(kind: str) -> str:
    """A kind of loss in words."""
    return _LOSSES.get(kind, kind)


ABLATED = {
    "whole": "a step",
    "exposed_communication": "messages add",
    "exposed_computing": "kernels add",
    "hidden": "hidden",
    "without_both": "the rest",
}
"""Columns of an ablation: a step is the sum of the others."""


def ablation_text(data: dict[str, Any]) -> str:
    """What the ablation says of the rank whose step takes longest, in a sentence; "" where there was none."""
    if not data.get("ablation"):
        return ""
    one = max(data["ablation"], key=lambda row: row["whole"])
    hidden = f"{time_text(abs(one['hidden']))} {'are hidden' if one['hidden'] >= 0 else 'of these go away with either'}"
    return (
        f"of a step of {time_text(one['whole'])} on rank {one['rank']}, "
        f"attention's messages {_added(one['exposed_communication'])}, its kernels {_added(one['exposed_computing'])}, "
        f"{hidden}, and the rest takes {time_text(one['without_both'])}"
    )


def _added(difference: int) -> str:
    """A step may come out shorter than without what it does: then runs differ by more than that takes."""
    return f"add {time_text(difference)}" if difference > 0 else "add no more than runs differ by"


def drift_text(data: dict[str, Any]) -> str:
    """By how much the clocks of devices went from their hosts', and whether times are corrected; "" on hosts."""
    if not data.get("drift"):
        return ""
    worst = max(data["drift"], key=lambda row: abs(row["ppm"]))
    done = "taken out" if worst["corrected"] else f"not taken out: uncertain by {worst['uncertainty_ppm']:.2g}"
    return f"device clocks drift by up to {abs(worst['ppm']):.2g} ppm, {done}"


def step_rows(data: dict[str, Any]) -> list[dict[str, Any]]:
    """A row per ring step of a pass: means over ranks of a mean call, and what it works on.

    The slowest rank is the one that computes longest: one that waits long is not slow, it waits for a slow one.
    """
    rows = []
    for index, one in enumerate(data["steps"]):
        ranks = one["ranks"]
        times = max(r["times"] for r in ranks)
        slowest = max(ranks, key=lambda r: r["compute"] / r["times"])

        def mean(name: str, of: list[dict[str, Any]] = ranks) -> float:
            shares: list[float] = [r[name] / r["times"] for r in of]
            return sum(shares) / len(shares)

        compute = sum(r["compute"] for r in ranks)
        rows.append(
            {
                "index": index,
                "pass": PASSES[one["backward"]],
                "step": one["step"],
                "times": times,
                **{name: mean(name) for name in _STEP_PARTS},
                "slowest": slowest["rank"] if slowest["compute"] else "-",
                "slowest_compute": slowest["compute"] / slowest["times"],
                "longest_wait": max(r["blocking"] / r["times"] for r in ranks),
                "flops_per_second": sum(r["flops"] for r in ranks) * 1e9 / compute if compute else 0.0,
                "received_bytes": mean("received_bytes"),
                "tiles": mean("tiles"),
            }
        )
    return rows


def layer_rows(data: dict[str, Any]) -> list[dict[str, Any]]:
    """A row an attention (a layer) and pass, added up over training steps, means over ranks."""
    rows = []
    for one in data["layers"]:
        ranks = one["ranks"]
        sums = {
            name: sum(r[name] for r in ranks) / len(ranks)
            for name in ("span", "compute", "exposed_comm", "blocking", "idle")
        }
        rows.append({"layer": one["call"], "pass": PASSES[one["backward"]], **sums})
    return rows


def prediction_rows(data: dict[str, Any]) -> list[dict[str, Any]]:
    """Prediction beside measurement, a row per pass of a rank; `longest` is the scale that they share."""
    rows = [{**one, "index": i} for i, one in enumerate(data["prediction"]) if one["measured"] and one["predicted"]]
    longest = max((max(r["predicted"], r["measured"]) for r in rows), default=1) or 1
    return [{**row, "longest": longest} for row in rows]


def roofline_text(row: dict[str, Any]) -> str:
    """Where a row of `achieved` stands below what the device could do, in a few words."""
    if row["of_ceiling"] is None:
        return "unknown"
    return f"{percent(row['of_ceiling'])} of {scaled(row['ceiling'], 'FLOP/s')} ({row['bound']} bound)"


def peaks_text(data: dict[str, Any]) -> list[str]:
    """What is known of the devices' peaks and who says so, a line a kind of device and dtype."""
    kinds: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for one in data.get("peaks", ()):
        source = f"measured: {one['source']}" if one["measured"] else one["source"]
        kinds.setdefault((one["device"] or "device", one["dtype"], source), []).append(one)
    return [
        f"{device}, {dtype}: {_span(ones, 'flops', 'FLOP/s')}, memory {_span(ones, 'bandwidth', 'B/s')} ({source})"
        for (device, dtype, source), ones in kinds.items()
    ]


def hardware_text(data: dict[str, Any]) -> list[str]:
    """What plans are predicted with and who says so: no bound on what a device can do, and often a guess."""
    lines = []
    for hardware in (plan["hardware"] for plan in data["plans"]):
        source = hardware.get("source", "")
        whose = f" ({source})" if isinstance(source, str) and source and source.isprintable() else ""
        flops, bandwidth = (
            scaled(hardware["tflops"] * 1e12, "FLOP/s"),
            scaled(hardware["intra_node_bandwidth"] * 1e9, "B/s"),
        )
        lines.append(f"{flops} and {bandwidth} a rank{whose}")
    return list(dict.fromkeys(lines))


def _span(ones: list[dict[str, Any]], key: str, unit: str) -> str:
    """From the least to the most of all ranks; "unknown" where one has none."""
    values = [one[key] for one in ones]
    if None in values:
        return "FLOP/s unknown" if key == "flops" else "unknown"
    low, high = scaled(min(values), unit), scaled(max(values), unit)
    return low if low == high else f"{low} to {high}"


def traced_rows(data: dict[str, Any]) -> list[dict[str, Any]]:
    """A row a kernel's name and pass, as the tracer saw it, over all ranks and steps; the longest first."""
    rows: dict[tuple[str, int, str], dict[str, Any]] = {}
    for one in data.get("traced", ()):
        for k in one["kernels"]:
            key = k["name"], k["backward"], k["kind"]
            row = rows.setdefault(
                key,
                {"name": k["name"], "pass": PASSES[k["backward"]], "kind": k["kind"], "times": 0, "time": 0, "most": k},
            )
            row["times"] += k["times"]
            row["time"] += k["time"]
            if k["time"] > row["most"]["time"]:
                row["most"] = k
    return sorted(rows.values(), key=lambda r: -r["time"])


_RANKS = 32
_LOSS_COLUMNS = 5


def markdown(data: dict[str, Any]) -> str:
    """Verdict, partition and losses as GitHub's Markdown."""
    verdict = data["verdict"]
    lines = [f"**{loss_name(verdict['kind']).capitalize()}.** {verdict['text']}", ""]
    if verdict["advice"]:
        lines += [f"What to do: {verdict['advice']}.", ""]
    lines += [
        "| rank | span | computing | exposed communication | exposed copies | idle | blocking |",
        "| ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for rank in data["ranks"][:_RANKS]:
        names = ("span", "compute", "exposed_comm", "exposed_copy", "idle", "blocking")
        told = ("-" if data.get("light") and name == "exposed_copy" else time_text(rank[name]) for name in names)
        lines.append(f"| {rank['rank']} | {' | '.join(told)} |")
    if len(data["ranks"]) > _RANKS:
        lines.append(f"| and {len(data['ranks']) - _RANKS} more | | | | | | |")
    if text := training_text(data):
        lines += ["", f"{text[0].upper()}{text[1:]}."]
    if data.get("light"):
        lines += ["", f"This is {LIGHT}; copies count as idle."]
    if ablated := data.get("ablation"):
        lines += ["", f"| ablation | {' | '.join(ABLATED.values())} |", f"| --- |{' ---: |' * len(ABLATED)}"]
        for row in ablated[:_RANKS]:
            lines.append(f"| rank {row['rank']} | {' | '.join(time_text(row[name]) for name in ABLATED)} |")
    if data.get("achieved"):
        lines += ["", "| rank | pass | in kernels | planned | of the roofline |", "| ---: | --- | ---: | ---: | ---: |"]
        for row in data["achieved"][: 2 * _RANKS]:
            hardware = (scaled(row[key], "FLOP/s") if row[key] else "-" for key in ("flop_rate", "planned_flop_rate"))
            lines.append(f"| {row['rank']} | {row['pass']} | {' | '.join(hardware)} | {roofline_text(row)} |")
        lines += ["", *(f"Planned for {line}." for line in hardware_text(data))]
        lines += ["", *(f"Peaks of {line}." for line in peaks_text(data))]
    if data["losses"]:
        lines += ["", "| lost | of the run | what |", "| ---: | ---: | --- |"]
        lines += [
            f"| {time_text(loss['lost'])} | {percent(loss['share'])} | {loss['text']} |"
            for loss in data["losses"][:_LOSS_COLUMNS]
        ]
    return "\n".join(lines) + "\n"
