"""Write the report of a run: one self-contained HTML file, for screen and print."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from markupsafe import Markup, escape

from burst_portable.cli.drawing import rank_label, score_matrix
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
    bar_ticks, bar_x = _bar_scale(max(sum(row.values()) for row in rows) or 1.0)
    page = environment.get_template("report.html.j2").render(
        f=facts,
        p=facts["plan"],
        style=Markup((Path(__file__).parent / "style.css").read_text(encoding="utf-8")),
        result=result_text(facts),
        timing=timing_text(facts),
        mfu_text=mfu_text(facts),
        losses=loss_chart(facts),
        differences=difference_chart(facts),
        score_matrix=score_matrix(plan.call.mask, plan.call.layout),
        colors=_COLORS,
        legend=[(rank % _COLORS, rank_label(rank)) for rank in range(min(facts["world_size"], 16))],
        time_rows=rows,
        bar_ticks=bar_ticks,
        bar_x=bar_x,
        parts=PARTS,
        traffic_text=traffic_text,
        width=_WIDTH,
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


# Positions in the charts, which macros of report.html.j2 draw as inline SVG.

_WIDTH = 720
_TOP, _BOTTOM = 12, 40
_BAR_START, _BAR_STOP = 72, 690
_SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


class Chart(NamedTuple):
    """Values over steps.

    Attributes:
        height: Height of the drawing.
        y_label: What the values are.
        ticks: Height and text of each horizontal line.
        steps: Position and number of each labelled step.
        series: CSS class of each line, and its points: x, y, CSS class, tooltip.
        limit: Height of the largest allowed value, and its text.
    """

    height: int
    y_label: str
    ticks: list[tuple[float, str]]
    steps: list[tuple[float, int]]
    series: list[tuple[str, list[tuple[float, float, str, str]]]]
    limit: tuple[float, str] | None = None
    left: int = 62
    right: int = 706

    @property
    def bottom(self) -> int:
        """Height of the horizontal axis."""
        return self.height - _BOTTOM

    @property
    def middle(self) -> float:
        """Height of the middle of the vertical axis."""
        return (_TOP + self.bottom) / 2


def loss_chart(facts: dict[str, Any]) -> Chart | None:
    """Return the chart of the losses of ranks and reference; None if no loss is finite."""
    series = [("ranks", f"{facts['world_size']} ranks", facts["losses"])]
    if facts["reference_losses"]:  # the wide line is drawn below the narrow one, so that both are visible if equal
        series.insert(0, ("reference", "one device", facts["reference_losses"]))
    finite = [[(i, v) for i, v in enumerate(values) if v is not None and math.isfinite(v)] for *_, values in series]
    if not (all_finite := [v for values in finite for _, v in values]):
        return None
    height, ticks = 250, _round_numbers(min(all_finite), max(all_finite))
    x, y = _x_scale(len(facts["losses"])), _scale(ticks[0], ticks[-1], height - _BOTTOM, _TOP)
    lines = [
        (style, [(x(i), y(v), style, f"{name}, step {i + 1}: {v:.6f}") for i, v in values])
        for (style, name, _), values in zip(series, finite, strict=True)
    ]
    return Chart(height, "loss", [(y(t), _number(t)) for t in ticks], _steps(len(facts["losses"]), x), lines)


def difference_chart(facts: dict[str, Any]) -> Chart | None:
    """Return the chart of differences from the reference on a logarithmic scale, with 0 at the bottom."""
    values, limit = facts["relative_differences"], facts["tolerances"]["loss"]
    if values is None:
        return None
    positive = [limit, *(v for v in values if v > 0 and math.isfinite(v))]
    low = math.floor(math.log10(min(positive))) - 1
    high = math.ceil(math.log10(max(positive))) + (max(positive) == limit)
    height, powers = 190, range(low + 1, high + 1, max(1, (high - low) // 5))
    x, y = _x_scale(len(values)), _scale(low, high, height - _BOTTOM, _TOP)
    ticks = [*((y(p), f"10{str(p).translate(_SUPERSCRIPTS)}") for p in powers), (y(low), "0")]
    tops = [low if v <= 0 else min(math.log10(v), high) if math.isfinite(v) else high for v in values]
    stems = [
        (x(i), y(top), "ranks" if v <= limit else "wrong", f"step {i + 1}: {v:.2e}")
        for i, (v, top) in enumerate(zip(values, tops, strict=True))
    ]
    allowed = y(math.log10(limit)), f"allowed: {limit:.0e}"
    return Chart(height, "relative difference", ticks, _steps(len(values), x), [("ranks", stems)], allowed)


def _bar_scale(longest: float) -> tuple[list[tuple[float, str]], Callable[[float], float]]:
    """Return position and text of each tick of bars up to this many seconds, and the position of a time."""
    ticks = _round_numbers(0.0, longest)
    x = _scale(0.0, max(ticks[-1], longest), _BAR_START, _BAR_STOP)
    return [(x(t), _number(t)) for t in ticks], x


def _scale(low: float, high: float, start: float, stop: float) -> Callable[[float], float]:
    span = (high - low) or 1.0
    return lambda value: round(start + (value - low) / span * (stop - start), 1)


def _x_scale(steps: int) -> Callable[[float], float]:
    return _scale(0, max(1, steps - 1), 74, 694)


def _steps(steps: int, x: Callable[[float], float]) -> list[tuple[float, int]]:
    return [(x(i), i + 1) for i in range(0, steps, max(1, math.ceil(steps / 12)))]


def _round_numbers(low: float, high: float) -> list[float]:
    """Return four to seven round numbers around a range."""
    span = (high - low) or abs(high) or 1.0
    power = 10 ** math.floor(math.log10(span / 4))
    step = next(m * power for m in (1, 2, 2.5, 5, 10) if span / (m * power) <= 5)
    first = math.floor(low / step + 1e-9)
    count = math.ceil((high - first * step) / step - 1e-9)
    return [(first + i) * step for i in range(max(1, count) + 1)]


def _number(value: float) -> str:
    return f"{value:.10g}" if abs(value) >= 1e-6 else "0"
