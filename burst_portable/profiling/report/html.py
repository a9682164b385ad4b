"""Write a report as one self-contained HTML file: numbers by jinja2, the timeline by JavaScript."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from burst_portable.planning.plans import PASSES
from burst_portable.profiling.analysis.evidence import evidence_of
from burst_portable.profiling.analysis.train_steps import training_text
from burst_portable.profiling.intervals import PARTS, largest_contention
from burst_portable.profiling.report.tables import (
    ABLATED,
    BASIC,
    NAMES,
    bottleneck_name,
    drift_text,
    hardware_text,
    kernel_rows,
    layer_rows,
    peaks_text,
    prediction_rows,
    roofline_text,
    step_rows,
    totals,
)
from burst_portable.utils.text import bytes_text, percent, scaled, time_text

_UNIT = 100  # nanoseconds: the resolution of the timeline
_MAX_EVENTS = 45_000  # drawn events, about 15 bytes each
_MAX_ROWS = 400
_MAX_KERNELS = 40
_MAX_BARS = 32
_BAR = (
    *((part, f"{part}_ns", NAMES[part]) for part in PARTS if part != "idle"),
    ("idle", "idle_between_kernels_ns", "idle between kernels"),
    ("outside", "idle_outside_attention_ns", "idle, or work outside attention"),
)
_SENSORS = {"watts": "W", "megahertz": "MHz", "celsius": "°C"}
_MIN_DRAWN = 20_000  # nanoseconds: shorter waits and copies are not drawn


def template_environment(package: str) -> Environment:
    """Return a jinja2 environment for the templates of a package: it escapes, and raises for undefined names."""
    loader = PackageLoader(package, ".")
    return Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)


def page(data: dict[str, Any]) -> str:
    """Return the HTML file as text."""
    environment = template_environment("burst_portable.profiling.report")
    environment.filters.update(
        time=time_text,
        percent=percent,
        scaled=scaled,
        bytes=bytes_text,
        flops=_flops,
        bottleneck_name=bottleneck_name,
        backward=PASSES.index,
        keep_units=keep_units_together,
    )
    environment.globals.update(
        cell=_cell,
        bytes=bytes_text,
        flops=_flops,
        scaled=scaled,
        roofline=roofline_text,
        bar_parts=_bar_parts,
        legend=[(style, name) for style, _, name in _BAR],
    )
    folder = Path(__file__).parent
    drawn, left_out = drawable(data)
    steps = step_rows(data)
    longest = sorted(steps, key=lambda step: -step["span"])[:_MAX_BARS]
    return environment.get_template("page.html.j2").render(
        d=data,
        parts=PARTS,
        basic=BASIC if data["level"] == "basic" else "",
        names=NAMES,
        longest=max((rank["span_ns"] for rank in data["ranks"]), default=1) or 1,
        totals=_totals(data),
        steps=steps[:_MAX_ROWS],
        most=max(steps, key=lambda step: step["blocking"], default=None),
        longest_step=max((step["span"] for step in steps), default=0),
        longest_steps=[step for step in steps if step["span"] and step in longest],
        steps_left_out=max(0, len(steps) - _MAX_ROWS),
        layers=layer_rows(data)[:_MAX_ROWS],
        prediction=prediction_rows(data),
        contention=largest_contention(data),
        ablated=ABLATED,
        peaks=peaks_text(data),
        hardware=hardware_text(data),
        sensors=_curves(data),
        drift=drift_text(data),
        training=training_text(data),
        kernels=kernel_rows(data)[:_MAX_KERNELS],
        left_out=left_out,
        style=Markup((folder / "style.css").read_text(encoding="utf-8")),
        script=Markup((folder / "timeline.js").read_text(encoding="utf-8")),
        events=Markup(json.dumps(drawn, separators=(",", ":")).replace("<", "\\u003c")),
    )


def keep_units_together(text: str) -> str:
    """Return the text with no-break spaces between numbers and their units."""
    return re.sub(r"(?<=\d) (?=(?:%|[nµm]?s|[kKMGTPE]?i?(?:B|FLOP)(?:/s)?)(?!\w))", "\u00a0", text)


def _flops(value: float) -> str:
    return scaled(value, "FLOP/s")


def _cell(value: float | None, path: str, text: str | Callable[..., str] = time_text, *unit: str) -> Markup:
    """Return a table cell with its path in the JSON; the tooltip gives the source of the number. "-" if unknown."""
    if value is None:
        return Markup('<td class="n">-</td>')
    cell = Markup('<td class="n" data-path="{}" data-value="{}" title="{}">{}</td>')
    shown = text if isinstance(text, str) else text(value, *unit)
    return cell.format(path, value, evidence_of(path.rpartition(".")[2]), shown)


def _bar_parts(rank: dict[str, Any]) -> list[tuple[str, int, str]]:
    """Return (style, nanoseconds, name) of each part of a rank's bar; idle time is split into two parts."""
    return [(style, rank[part], name) for style, part, name in _BAR if rank[part]]


def _curves(data: dict[str, Any]) -> list[dict[str, Any]]:
    """Return a row per rank and sensor: its range as text, and its values as points of a line of 1000 x 100."""
    rows = []
    for one in data["sensors"]:
        for name, unit in _SENSORS.items():
            values = one.get(name, [])
            if len(values) > 1:
                low, high = min(values), max(values)
                first, last = one["time_ns"][0], one["time_ns"][-1]
                points = " ".join(
                    f"{1000 * (at - first) / max(1, last - first):.0f},{95 - 90 * (v - low) / (high - low or 1):.0f}"
                    for at, v in zip(one["time_ns"], values, strict=True)
                )
                text = f"{low:.0f} to {high:.0f} {unit}, mean {sum(values) / len(values):.0f}"
                rows.append({"rank": one["rank"], "name": unit, "text": text, "points": points})
    return rows


def _totals(data: dict[str, Any]) -> dict[str, float]:
    sums = totals(data)
    span, compute = sums["span"], sums["compute"]
    names = (*PARTS, "blocking", "idle_outside_attention")
    return {
        **{f"{name}_share": sums[name] / span if span else 0.0 for name in names},
        "kernel_rate": sums["flops"] * 1e9 / compute if compute else 0.0,
        "rate": sums["flops"] * 1e9 / span if span else 0.0,
        "span": max((rank["span_ns"] for rank in data["ranks"]), default=0),
    }


def drawable(data: dict[str, Any]) -> tuple[dict[str, Any], str]:
    """Return the events in a compact form, and a sentence about events that are left out ("" if none).

    Starts are stored as differences, and equal (kind, pass, owners, work) once, by index.
    """
    kinds, ranks = data["events"]["kinds"], data["events"]["ranks"]
    may_be_hidden = {number for number, kind in enumerate(kinds) if kind in ("wait", "post", "copy")}
    shown = {
        r["rank"]: [i for i, k in enumerate(r["kind"]) if k not in may_be_hidden or r["duration_ns"][i] >= _MIN_DRAWN]
        for r in ranks
    }
    starts = sorted(r["start_ns"][i] for r in ranks for i in shown[r["rank"]])
    until, note = math.inf, ""
    if (later := len(starts) - _MAX_EVENTS) > 0:
        until = starts[_MAX_EVENTS]
        note = f"The timeline shows the first {time_text(until)}; {later:,} later events are only in the JSON."
    seen: dict[tuple[int, ...], int] = {}
    rows = []
    for r in ranks:
        at, flat = 0, []
        # Changes of (train step, attention call, ring step), each with the number of events since the last change.
        locations: list[int] = []
        last, since = None, 0
        for n, i in enumerate(x for x in shown[r["rank"]] if r["start_ns"][x] < until):
            start, stop = r["start_ns"][i] // _UNIT, (r["start_ns"][i] + r["duration_ns"][i]) // _UNIT
            what = tuple(r[name][i] for name in ("kind", "backward", "a", "b", "work"))
            flat += [start - at, stop - start, seen.setdefault(what, len(seen))]
            if (location := (r["train_step"][i], r["attention_call"][i], r["ring_step"][i])) != last:
                locations += [n - since, *location]
                last, since = location, n
            at = start
        rows.append({"rank": r["rank"], "e": flat, "p": locations})
    return {"unit": _UNIT, "kinds": kinds, "what": [list(w) for w in seen], "ranks": rows}, note
