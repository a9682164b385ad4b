"""Draw charts as inline SVG. Colors are classes of style.css, so that light, dark and print share one drawing."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from markupsafe import Markup, escape

from burst_portable.cli.drawing import Cell

_WIDTH, _HEIGHT = 720, 250
_LEFT, _RIGHT, _TOP, _BOTTOM = 62, 14, 12, 40
COLORS = 8  # of ranks, which repeat


class Series(NamedTuple):
    """A line: CSS class, name, and one value per step (None if it is not finite)."""

    style: str
    name: str
    values: Sequence[float | None]


class Part(NamedTuple):
    """A part of a bar: CSS class, name, length."""

    style: str
    name: str
    value: float


def lines(series: Sequence[Series], x_label: str, y_label: str) -> Markup:
    """Draw values over steps as lines with dots."""
    finite = [v for s in series for v in s.values if v is not None and math.isfinite(v)]
    if not finite:
        return Markup("")
    ticks = _ticks(min(finite), max(finite))
    steps = max(len(s.values) for s in series)
    x, y = _x_scale(steps), _scale(ticks[0], ticks[-1], _HEIGHT - _BOTTOM, _TOP)
    parts = [_grid([(y(t), _number(t)) for t in ticks]), _steps_axis(steps, x, x_label), _y_label(y_label)]
    for s in series:
        points = [(x(i), y(v)) for i, v in enumerate(s.values) if v is not None and math.isfinite(v)]
        path = " ".join(f"{px:.1f},{py:.1f}" for px, py in points)
        parts.append(f'<polyline class="line {s.style}" points="{path}"/>')
        for (px, py), (i, v) in zip(points, ((i, v) for i, v in enumerate(s.values) if v is not None), strict=False):
            title = f"{escape(s.name)}, step {i + 1}: {v:.6f}"
            parts.append(f'<circle class="dot {s.style}" cx="{px:.1f}" cy="{py:.1f}"><title>{title}</title></circle>')
    return _svg(parts, _HEIGHT, f"{y_label} over {x_label}")


def differences(values: Sequence[float], limit: float, x_label: str) -> Markup:
    """Draw differences over steps and their limit on a logarithmic scale. 0 is drawn at the bottom."""
    positive = [v for v in values if v > 0 and math.isfinite(v)]
    low = math.floor(math.log10(min([*positive, limit]))) - 1
    high = math.ceil(math.log10(max([*positive, limit]))) + (1 if max([*positive, limit]) == limit else 0)
    height = 190
    x, y = _x_scale(len(values)), _scale(low, high, height - _BOTTOM, _TOP)
    every = max(1, (high - low) // 5)
    ticks = [(y(p), f"10{_superscript(p)}") for p in range(low + 1, high + 1, every)] + [(y(low), "0")]
    at = y(math.log10(limit))
    parts = [
        f'<rect class="allowed" x="{_LEFT}" y="{at:.1f}" width="{_WIDTH - _LEFT - _RIGHT}" '
        f'height="{height - _BOTTOM - at:.1f}"/>',
        _grid(ticks),
        _steps_axis(len(values), x, x_label, height),
        _y_label("relative difference", height),
        f'<line class="limit" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{at:.1f}" y2="{at:.1f}"/>'
        f'<text class="limit-text" x="{_WIDTH - _RIGHT - 4}" y="{at - 5:.1f}">allowed: {limit:.0e}</text>',
    ]
    for i, value in enumerate(values):
        top = y(low if value <= 0 else min(math.log10(value), high) if math.isfinite(value) else high)
        style = "ranks" if value <= limit else "wrong"
        parts.append(
            f'<line class="stem {style}" x1="{x(i):.1f}" x2="{x(i):.1f}" y1="{height - _BOTTOM}" y2="{top:.1f}"/>'
            f'<circle class="dot {style}" cx="{x(i):.1f}" cy="{top:.1f}">'
            f"<title>step {i + 1}: {value:.2e}</title></circle>"
        )
    return _svg(parts, height, "relative difference of losses")


def bars(rows: Sequence[tuple[str, Sequence[Part]]], unit: str) -> Markup:
    """Draw one bar per row, made of parts, on one scale."""
    longest = max(sum(p.value for p in parts) for _, parts in rows) or 1.0
    ticks = _ticks(0.0, longest)
    x = _scale(0.0, max(ticks[-1], longest), _LEFT + 10, _WIDTH - 30)
    height = 34 * len(rows) + 34
    drawn = [
        f'<line class="grid" x1="{x(t):.1f}" x2="{x(t):.1f}" y1="4" y2="{height - 26}"/>'
        f'<text class="tick middle" x="{x(t):.1f}" y="{height - 10}">{_number(t)} {escape(unit)}</text>'
        for t in ticks
    ]
    for index, (name, parts) in enumerate(rows):
        top, at = 8 + 34 * index, 0.0
        drawn.append(f'<text class="tick end" x="{_LEFT + 2}" y="{top + 16}">{escape(name)}</text>')
        for part in parts:
            left, right = x(at), x(at + part.value)
            drawn.append(
                f'<rect class="part {part.style}" x="{left:.1f}" y="{top}" width="{max(0.0, right - left - 1):.1f}" '
                f'height="22" rx="2"><title>{escape(part.name)}: {part.value:.3f} {escape(unit)}</title></rect>'
            )
            at += part.value
    return _svg(drawn, height, "seconds per step")


def matrix(rows: Sequence[Sequence[Cell]]) -> Markup:
    """Draw the score matrix: rows are queries, columns are keys, colors are the ranks of the queries."""
    size, cell, edge = len(rows), 12, 20
    parts = [
        f'<text class="tick" x="{edge}" y="12">keys →</text>',
        f'<text class="tick" transform="translate(4 {edge + 2}) rotate(90)">queries →</text>',
    ]
    for r, row in enumerate(rows):
        for c, one in enumerate(row):
            if not one.visible:
                style, opacity = "masked", 1.0
            else:
                style = "several" if one.rank is None else f"rank{one.rank % COLORS}"
                opacity = 1.0 if one.visible == 1 else 0.55
            parts.append(
                f'<rect class="cell {style}" x="{edge + c * cell}" y="{edge + r * cell}" width="{cell - 1}" '
                f'height="{cell - 1}" fill-opacity="{opacity}"/>'
            )
    side = edge + size * cell
    name = "visible query-key pairs, by the rank of the query"
    return Markup(
        f'<svg class="matrix" viewBox="0 0 {side} {side}" width="{side}" role="img" aria-label="{name}">'
        + "".join(parts)
        + "</svg>"
    )


# ------------------------------------------------------------------------------------------------ axes and scales


def _scale(low: float, high: float, start: float, stop: float) -> Callable[[float], float]:
    span = (high - low) or 1.0
    return lambda value: start + (value - low) / span * (stop - start)


def _x_scale(steps: int) -> Callable[[float], float]:
    return _scale(0, max(1, steps - 1), _LEFT + 12, _WIDTH - _RIGHT - 12)


def _ticks(low: float, high: float) -> list[float]:
    """Return four to seven round numbers around a range."""
    span = (high - low) or abs(high) or 1.0
    power = 10 ** math.floor(math.log10(span / 4))
    step = next(m * power for m in (1, 2, 2.5, 5, 10) if span / (m * power) <= 5)
    first = math.floor(low / step + 1e-9)
    count = math.ceil((high - first * step) / step - 1e-9)
    return [(first + i) * step for i in range(max(1, count) + 1)]


def _grid(ticks: Sequence[tuple[float, str]]) -> str:
    return "".join(
        f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{at:.1f}" y2="{at:.1f}"/>'
        f'<text class="tick end" x="{_LEFT - 8}" y="{at + 4:.1f}">{text}</text>'
        for at, text in ticks
    )


def _steps_axis(steps: int, x: Callable[[float], float], label: str, height: int = _HEIGHT) -> str:
    every = max(1, math.ceil(steps / 12))
    marks = "".join(
        f'<text class="tick middle" x="{x(i):.1f}" y="{height - _BOTTOM + 18}">{i + 1}</text>'
        for i in range(0, steps, every)
    )
    middle = (_LEFT + _WIDTH - _RIGHT) / 2
    return f'{marks}<text class="tick middle" x="{middle}" y="{height - 4}">{escape(label)}</text>'


def _y_label(text: str, height: int = _HEIGHT) -> str:
    middle = (_TOP + height - _BOTTOM) / 2
    return f'<text class="tick middle" transform="translate(13 {middle}) rotate(-90)">{escape(text)}</text>'


def _number(value: float) -> str:
    return f"{value:.10g}" if abs(value) >= 1e-6 else "0"


def _superscript(power: int) -> str:
    return str(power).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))


def _svg(parts: Sequence[str], height: int, label: str) -> Markup:
    return Markup(
        f'<svg viewBox="0 0 {_WIDTH} {height}" role="img" aria-label="{escape(label)}">{"".join(parts)}</svg>'
    )
