"""Write the report of a run: one self-contained HTML file, for screen and print."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from markupsafe import Markup, escape

from burst_portable.cli.drawing import rank_label, score_matrix
from burst_portable.cli.run import charts
from burst_portable.cli.run.view import mfu_text, result_text, timing_text
from burst_portable.planning.plans import PASSES, Plan, traffic_text
from burst_portable.profiling.report.html import template_environment
from burst_portable.utils.text import bytes_text, scaled, time_text

# Parts of a step in the order in which they are drawn: (name, description) by CSS class.
PARTS = {
    "kernels": ("attention kernels", "forward and backward, of this rank's blocks"),
    "waiting": ("communication wait", "for blocks and gradients that computation did not overlap"),
    "rest": ("rest of the model", "projections, MLPs, norms, the loss and their gradients"),
    "computing": ("forward and backward", "kernels and waiting are not measured separately on this device"),
    "reducing": ("gradient all-reduce", "includes the wait for the slowest rank"),
    "optimizer": ("optimizer", "AdamW"),
}
_COLORS = 8  # of ranks, which repeat


def write_html(facts: dict[str, Any], plan: Plan, path: Path) -> None:
    """Write the report of a run, from the facts of `outcome.facts_of`. The plan's score matrix is drawn."""
    environment = template_environment("burst_portable.cli.run")
    environment.filters.update(
        bytes=bytes_text,
        flops=lambda x: scaled(x, "FLOP"),
        seconds=lambda x: time_text(1e9 * x),
        small=lambda x: f"{x:.1e}" if x else "0",
        loss=lambda x: f"{x:.6f}",
        count=lambda x: f"{x:,.0f}",
        unbroken=_unbroken,
    )
    rows = [time_parts(phases) for phases in facts["phases"]]
    bar_ticks, bar_x = charts.bar_scale(max(sum(row.values()) for row in rows) or 1.0)
    page = environment.get_template("report.html.j2").render(
        f=facts,
        p=facts["plan"],
        style=Markup((Path(__file__).parent / "style.css").read_text(encoding="utf-8")),
        result=result_text(facts),
        timing=timing_text(facts),
        mfu_text=mfu_text(facts),
        losses=charts.losses(facts),
        differences=charts.differences(facts),
        score_matrix=score_matrix(plan.call.mask, plan.call.layout),
        colors=_COLORS,
        legend=[(rank % _COLORS, rank_label(rank)) for rank in range(min(facts["world_size"], 16))],
        time_rows=rows,
        bar_ticks=bar_ticks,
        bar_x=bar_x,
        parts=PARTS,
        traffic_text=traffic_text,
        width=charts.WIDTH,
    )
    path.write_text(page, encoding="utf-8")


def _unbroken(text: str) -> Markup:
    """Prevent line breaks at the minus of numbers such as 1.2e-07."""
    return Markup(re.sub(r"\d[\d.]*e-\d+", r'<span class="unbroken">\g<0></span>', str(escape(text))))


def time_parts(phases: dict[str, float | None]) -> dict[str, float]:
    """Split a rank's mean step into its measured parts: seconds by CSS class."""
    computing = sum(phases.get(name) or 0.0 for name in PASSES)
    kernels, waiting = phases["kernels"], phases["communication_wait"]
    if kernels is None or waiting is None:
        spent = {"computing": computing}
    else:
        spent = {"kernels": kernels, "waiting": waiting, "rest": max(0.0, computing - kernels - waiting)}
    if "optimizer" in phases:
        spent |= {"reducing": phases["gradient_all_reduce"] or 0.0, "optimizer": phases["optimizer"] or 0.0}
    return spent
