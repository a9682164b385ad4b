"""The report for a pull request."""

from __future__ import annotations

from typing import Any

from burst_portable.profiling.report.tables import ABLATED, LIGHT, loss_name, peaks_text, rates_text, roofline_text
from burst_portable.profiling.training import training_text
from burst_portable.units import percent, scaled, time_text

_RANKS = 32
_LOSSES = 5


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
            rates = (scaled(row[key], "FLOP/s") if row[key] else "-" for key in ("flop_rate", "planned_flop_rate"))
            lines.append(f"| {row['rank']} | {row['pass']} | {' | '.join(rates)} | {roofline_text(row)} |")
        lines += ["", *(f"Planned for {line}." for line in rates_text(data))]
        lines += ["", *(f"Peaks of {line}." for line in peaks_text(data))]
    if data["losses"]:
        lines += ["", "| lost | of the run | what |", "| ---: | ---: | --- |"]
        lines += [
            f"| {time_text(loss['lost'])} | {percent(loss['share'])} | {loss['text']} |"
            for loss in data["losses"][:_LOSSES]
        ]
    return "\n".join(lines) + "\n"
