"""The report of a run: one HTML file that needs nothing else, for screens and for paper."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from markupsafe import Markup, escape

from burst_portable.cli.drawing import score_matrix
from burst_portable.cli.run import charts
from burst_portable.cli.run.charts import Part, Series
from burst_portable.cli.run.view import mfu_text, timing_text, verdict_text
from burst_portable.planning.plans import PASSES, Plan, traffic_text
from burst_portable.profiling.report.html import template_environment
from burst_portable.utils.text import bytes_text, scaled, time_text

# What a step is made of, in the order in which it is drawn: (class, name, what it is).
PARTS = (
    ("kernels", "attention kernels", "forward and backward, on this rank's blocks"),
    ("waiting", "waiting for ranks", "for blocks and gradients that computing did not hide"),
    ("rest", "rest of the model", "projections, MLPs, norms, the loss and their gradients"),
    ("summing", "summing gradients", "over the ranks, with the wait for the slowest"),
    ("optimizer", "optimizer", "AdamW"),
)
_UNKNOWN = ("computing", "forward and backward", "kernels and waiting were not told apart on this device")


def write_html(facts: dict[str, Any], plan: Plan, path: Path) -> None:
    """Write the report of a run.

    Args:
        facts: as `training.outcome.facts_of` made them.
        plan: that ran, for its picture.
    """
    environment = template_environment("burst_portable.cli.run")
    environment.filters.update(
        bytes=bytes_text,
        flops=lambda x: scaled(x, "FLOP"),
        seconds=lambda x: time_text(1e9 * x),
        small=lambda x: f"{x:.1e}" if x else "0",
        loss=lambda x: f"{x:.6f}",
        count=lambda x: f"{x:,.0f}",
        whole=_whole,
    )
    rows = [time_parts(phases) for phases in facts["phases"]]
    page = environment.get_template("report.html.j2").render(
        f=facts,
        p=facts["plan"],
        style=Markup((Path(__file__).parent / "style.css").read_text(encoding="utf-8")),
        verdict=verdict_text(facts),
        timing=timing_text(facts),
        mfu_text=mfu_text(facts),
        losses=_losses(facts),
        differences=_differences(facts),
        matrix=charts.matrix(score_matrix(plan.call.mask, plan.call.layout)),
        legend=[(rank % charts.COLOURS, charts.rank_label(rank)) for rank in range(min(facts["world_size"], 16))],
        time=charts.bars([(f"rank {i}", parts) for i, parts in enumerate(rows)], "s"),
        time_rows=rows,
        traffic_text=traffic_text,
        told={name: what for _, name, what in (*PARTS, _UNKNOWN)},
    )
    path.write_text(page, encoding="utf-8")


def _whole(text: str) -> Markup:
    """A sentence whose numbers are not broken at their minus: 1.2e-07."""
    return Markup(re.sub(r"\d[\d.]*e-\d+", r'<span class="whole">\g<0></span>', str(escape(text))))


def time_parts(phases: dict[str, float | None]) -> list[Part]:
    """A rank's mean step, cut into what is known of it."""
    computing = sum(phases.get(name) or 0.0 for name in PASSES)
    kernels, waiting = phases["kernels"], phases["communication_wait"]
    if kernels is None or waiting is None:
        spent = {"computing": computing}
    else:
        spent = {"kernels": kernels, "waiting": waiting, "rest": max(0.0, computing - kernels - waiting)}
    if "optimizer" in phases:
        spent |= {"summing": phases["gradient_all_reduce"] or 0.0, "optimizer": phases["optimizer"] or 0.0}
    names = {style: name for style, name, _ in (*PARTS, _UNKNOWN)}
    return [Part(style, names[style], seconds) for style, seconds in spent.items()]


def _losses(facts: dict[str, Any]) -> Markup:
    ranks = Series("ranks", f"{facts['world_size']} ranks", facts["losses"])
    alone = facts["reference_losses"]
    # The wide line lies below the narrow one, so that two equal courses are both seen.
    series = [Series("alone", "one device", alone), ranks] if alone else [ranks]
    return charts.lines(series, "batch" if facts["mode"] == "perplexity" else "step", "loss")


def _differences(facts: dict[str, Any]) -> Markup | None:
    values = facts["relative_differences"]
    if values is None:
        return None
    return charts.differences(values, facts["tolerances"]["loss"], "batch" if facts["mode"] == "perplexity" else "step")
