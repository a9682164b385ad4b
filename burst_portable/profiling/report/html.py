"""The report as one HTML file that needs nothing else: numbers by jinja2, the timeline by a page of JavaScript."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from burst_portable.planning.plans import PASSES
from burst_portable.profiling.analysis.analyze import evidence_of, training_text
from burst_portable.profiling.intervals import PARTS, contended
from burst_portable.profiling.report.tables import (
    ABLATED,
    LIGHT,
    NAMES,
    drift_text,
    hardware_text,
    layer_rows,
    loss_name,
    peaks_text,
    prediction_rows,
    roofline_text,
    step_rows,
    traced_rows,
)
from burst_portable.utils.text import bytes_text, percent, scaled, time_text

_UNIT = 100  # nanoseconds: the resolution of the timeline
_MOST_EVENTS = 45_000  # that are drawn: about 15 bytes each
_MOST_ROWS = 400
_MOST_KERNELS = 40
_MOST_BARS = 32
_BAR = (
    *((part, part, NAMES[part]) for part in PARTS if part != "idle"),
    ("idle", "idle_between_kernels", "idle between kernels"),
    ("outside", "idle_outside_attention", "idle, or work outside attention"),
)
_SENSORS = {"watts": "W", "megahertz": "MHz", "celsius": "°C"}
_SHORT = 20_000  # nanoseconds: shorter waits and copies are not drawn


def template_environment(package: str) -> Environment:
    """Return an environment for the HTML templates of a package: escaped, strict, without blank lines of blocks."""
    loader = PackageLoader(package, ".")
    return Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)


def page(data: dict[str, Any]) -> str:
    """Return the whole file as text."""
    environment = template_environment("burst_portable.profiling.report")
    environment.filters.update(
        time=time_text,
        percent=percent,
        scaled=scaled,
        bytes=bytes_text,
        flops=lambda x: scaled(x, "FLOP/s"),
        loss_name=loss_name,
        backward=PASSES.index,
        whole=keep_units_together,
    )
    environment.globals.update(
        cell=_cell,
        maybe=_maybe,
        size=_size,
        roofline=roofline_text,
        bar_parts=_bar_parts,
        legend=[(style, name) for style, _, name in _BAR],
    )
    folder = Path(__file__).parent
    drawn, left_out = drawable(data)
    steps = step_rows(data)
    return environment.get_template("page.html.j2").render(
        d=data,
        v=data["verdict"],
        parts=PARTS,
        light=LIGHT if data.get("light") else "",
        names=NAMES,
        longest=max((rank["span"] for rank in data["ranks"]), default=1) or 1,
        totals=_totals(data),
        steps=steps[:_MOST_ROWS],
        most=max(steps, key=lambda step: step["blocking"], default=None),
        longest_step=max((step["span"] for step in steps), default=0),
        longest_steps=_longest(steps),
        steps_left_out=max(0, len(steps) - _MOST_ROWS),
        layers=layer_rows(data)[:_MOST_ROWS],
        prediction=prediction_rows(data),
        contended=contended(data),
        ablation=data.get("ablation", ())[:_MOST_ROWS],
        ablated=ABLATED,
        achieved=list(enumerate(data.get("achieved", ())))[:_MOST_ROWS],
        balance=data.get("balance", ()),
        peaks=peaks_text(data),
        hardware=hardware_text(data),
        sensors=_curves(data),
        drift=drift_text(data),
        training=training_text(data),
        traced=traced_rows(data)[:_MOST_KERNELS],
        left_out=left_out,
        style=Markup((folder / "style.css").read_text(encoding="utf-8")),
        script=Markup((folder / "timeline.js").read_text(encoding="utf-8")),
        events=Markup(json.dumps(drawn, separators=(",", ":")).replace("<", "\\u003c")),
    )


def keep_units_together(text: str) -> str:
    """Return the text with no-break spaces between numbers and their units."""
    return re.sub(r"(?<=\d) (?=(?:%|[nµm]?s|[kKMGTPE]?i?(?:B|FLOP)(?:/s)?)(?!\w))", "\u00a0", text)


def _longest(steps: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The steps with the longest windows, in their order; none where nothing took time."""
    spans = sorted((step["span"] for step in steps), reverse=True)[:_MOST_BARS]
    return [step for step in steps if step["span"] and step["span"] >= spans[-1]][:_MOST_BARS]


def _cell(value: float, path: str, text: str | None = None) -> Markup:
    """A number of the page, with its place in the JSON, and how it is known as a tooltip."""
    shown = time_text(value) if text is None else text
    told = evidence_of(path.rpartition(".")[2])
    cell = Markup('<td class="n" data-path="{}" data-value="{}" title="{}">{}</td>')
    return cell.format(path, value, told, shown)


def _maybe(value: float | None, path: str, unit: str) -> Markup:
    """The same of a number with a unit, which may not be known."""
    return Markup('<td class="n">-</td>') if value is None else _cell(value, path, scaled(value, unit))


def _size(value: float | None, path: str) -> Markup:
    """The same of a number of bytes."""
    return Markup('<td class="n">-</td>') if value is None else _cell(value, path, bytes_text(value))


def _bar_parts(rank: dict[str, Any]) -> list[tuple[str, int, str]]:
    """(style, nanoseconds, name) of a rank's bar; idle is told apart by where it lies."""
    return [(style, rank[part], name) for style, part, name in _BAR if rank[part]]


def _curves(data: dict[str, Any]) -> list[dict[str, Any]]:
    """A row per rank and sensor: its values in words, and as the points of a line of 1000 x 100."""
    rows = []
    for one in data.get("sensors", ()):
        for name, unit in _SENSORS.items():
            values = one.get(name, [])
            if len(values) > 1:
                low, high = min(values), max(values)
                first, last = one["time"][0], one["time"][-1]
                points = " ".join(
                    f"{1000 * (at - first) / max(1, last - first):.0f},{95 - 90 * (v - low) / (high - low or 1):.0f}"
                    for at, v in zip(one["time"], values, strict=True)
                )
                told = f"{low:.0f} to {high:.0f} {unit}, mean {sum(values) / len(values):.0f}"
                rows.append({"rank": one["rank"], "name": unit, "told": told, "points": points})
    return rows


def _totals(data: dict[str, Any]) -> dict[str, float]:
    ranks = data["ranks"]
    sums = {
        name: sum(rank[name] for rank in ranks) for name in ("span", "compute", "comm", "overlap", "blocking", *PARTS)
    }
    flops = sum(p["flops"] for rank in ranks for p in rank["passes"].values())
    return {
        **{f"{name}_share": sums[name] / sums["span"] if sums["span"] else 0.0 for name in (*PARTS, "blocking")},
        "outside_share": sum(r["idle_outside_attention"] for r in ranks) / sums["span"] if sums["span"] else 0.0,
        "overlap_share": sums["overlap"] / sums["comm"] if sums["comm"] else 0.0,
        "kernel_rate": flops * 1e9 / sums["compute"] if sums["compute"] else 0.0,
        "rate": flops * 1e9 / sums["span"] if sums["span"] else 0.0,
        "span": max((rank["span"] for rank in ranks), default=0),
    }


def drawable(data: dict[str, Any]) -> tuple[dict[str, Any], str]:
    """The events in a compact form: times as differences between starts, kinds as indices into a list.

    Returns them, and a sentence on what is left out, which is empty mostly.
    """
    kinds, ranks = data["events"]["kinds"], data["events"]["ranks"]
    often_short = {number for number, kind in enumerate(kinds) if kind in ("wait", "post", "copy")}
    shown = {
        r["rank"]: [i for i, k in enumerate(r["kind"]) if k not in often_short or r["duration"][i] >= _SHORT]
        for r in ranks
    }
    until, note = None, ""
    count = sum(map(len, shown.values()))
    if count > _MOST_EVENTS:
        starts = sorted(r["start"][i] for r in ranks for i in shown[r["rank"]])
        until = starts[_MOST_EVENTS]
        note = f"Drawn are the first {time_text(until)}: {count - _MOST_EVENTS:,} later events are in the JSON alone."
    told: dict[tuple[int, ...], int] = {}
    rows = []
    for r in ranks:
        at, flat = 0, []
        places, last, since = [], None, 0  # where (iteration, call, step) changes, counted from the last change
        for n, i in enumerate(x for x in shown[r["rank"]] if until is None or r["start"][x] < until):
            start, stop = r["start"][i] // _UNIT, (r["start"][i] + r["duration"][i]) // _UNIT
            what = tuple(r[name][i] for name in ("kind", "backward", "a", "b", "work"))
            flat += [start - at, stop - start, told.setdefault(what, len(told))]
            if (place := (r["iteration"][i], r["call"][i], r["step"][i])) != last:
                places += [n - since, *place]
                last, since = place, n
            at = start
        rows.append({"rank": r["rank"], "e": flat, "p": places})
    return {"unit": _UNIT, "kinds": kinds, "what": [list(w) for w in told], "ranks": rows}, note
