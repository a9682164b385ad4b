"""Draw the rows of a benchmark as SVG: bars in groups by mask, one color per entry, a panel per pass.

It is readable at half its width. A gap is an entry that did not support the mask or the heads; a wrong one has a cross.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from typing import Any

from burst_portable.bench.results import Row
from burst_portable.planning.plans import PASSES

WIDTH, _LEFT, _RIGHT = 1280, 88, 12  # a picture is wider if the words below its groups need it
_PANEL, _GAP, LINE = 250, 46, 24  # heights: a panel, above it, and of a line of text
_FONT, SMALL = 19, 17
_CHARACTER = 0.56  # mean width of a character, in heights of its font
_SPACE = 6  # pixels between words of neighbors
# Of Okabe and Ito, which most color-blind people can distinguish, then darker and lighter ones.
COLORS = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#56B4E9", "#CC79A7", "#F0E442", "#000000", "#7F7F7F", "#6A3D9A",
           "#B2DF8A", "#8C510A", "#882255", "#FB9A99", "#999933", "#40E0D0")  # fmt: skip


def draw(settings: Row, rows: Sequence[Row]) -> str:
    """Return the picture of a benchmark's rows."""
    kernels, lengths, sizes = (len({row[name] for row in rows}) for name in ("kernel", "seq_len", "ranks"))

    def series(row: Row) -> str:
        return f"{row['entry']}, {row['kernel']}" if kernels > 1 else str(row["entry"])

    def group(row: Row) -> str:
        length = f"_{row['seq_len']:,}" if lengths > 1 else ""
        return f"{row['mask']}{length}" + (f"_{row['ranks']} ranks" if sizes > 1 else "")

    named: dict[tuple[str, str], Row] = {(group(row), series(row)): row for row in rows}
    masks = list(dict.fromkeys(row["mask"] for row in rows))
    groups = list(dict.fromkeys(map(group, sorted(rows, key=lambda row: masks.index(row["mask"])))))
    timed = dict.fromkeys(series(row) for row in rows if row["status"] != "refused")
    colors = {name: COLORS[i % len(COLORS)] for i, name in enumerate(timed)}
    parts, top = _legend(colors)
    for one in PASSES:
        parts += _panel(one, named, groups, colors, top + _GAP)
        top += _GAP + _PANEL
    lines = max(len(name.split("_")) for name in groups)
    for i, name in enumerate(groups):
        x = _LEFT + (i + 0.5) * _group_width(groups)
        parts += [
            text_element(x, top + LINE * (n + 1), word, "middle", size=SMALL) for n, word in enumerate(name.split("_"))
        ]
    top += LINE * (lines + 1)
    for line in _caption(settings, rows):
        top += LINE
        parts.append(text_element(_LEFT, top, line))
    return page(parts, top + 14, math.ceil(_LEFT + _group_width(groups) * len(groups) + _RIGHT))


def _legend(colors: dict[str, str]) -> tuple[list[str], int]:
    """Return the lines of the legend, and where they end."""
    parts, x, y = [], _LEFT, LINE
    for name, color in colors.items():
        width = 34 + len(name) * _FONT * _CHARACTER
        if x + width > WIDTH - _RIGHT:
            x, y = _LEFT, y + LINE + 4
        parts += [
            f'<rect x="{x:.0f}" y="{y - 14}" width="16" height="16" fill="{color}"/>',
            text_element(x + 22, y, name),
        ]
        x += int(width) + 12
    return parts, y


def _panel(
    name: str, named: dict[tuple[str, str], Row], groups: list[str], colors: dict[str, str], top: int
) -> list[str]:
    """Return the axis and the bars of a pass."""
    largest = max((row.get(f"{name}_tflops", 0.0) for row in named.values()), default=0.0) or 1.0
    tick = _tick(largest)
    unit, factor = ("TFLOP/s", 1) if largest >= 1 else ("GFLOP/s", 1000)
    high = math.ceil(largest / tick) * tick
    bottom, parts = top + _PANEL, []
    width = _group_width(groups)
    for i in range(round(high / tick) + 1):
        y = bottom - _PANEL * i * tick / high
        parts.append(
            f'<path d="M{_LEFT} {y:.1f}H{_LEFT + width * len(groups):.0f}" stroke="{"#ddd" if i else "black"}"/>'
        )
        parts.append(text_element(_LEFT - 8, y + 6, f"{i * tick * factor:g}", "end"))
    parts.append(text_element(_LEFT, top - 12, f"{name}, {unit} per rank", weight="bold"))
    bar = width * 0.86 / max(1, len(colors))
    for i, group in enumerate(groups):
        for j, (entry, color) in enumerate(colors.items()):
            row = named.get((group, entry))
            if row is None or row["status"] == "refused":
                continue
            x = _LEFT + width * (i + 0.07) + bar * j
            if row["status"] == "ok":
                height = _PANEL * row[f"{name}_tflops"] / high
                title = escape(f"{entry}, {group}: {row[f'{name}_tflops'] * factor:.3g} {unit}")
                parts.append(
                    f'<rect x="{x:.1f}" y="{bottom - height:.1f}" width="{bar * 0.92:.1f}" height="{height:.1f}" '
                    f'fill="{color}"><title>{title}</title></rect>'
                )
            else:
                parts.append(text_element(x + bar / 2, bottom - 4, "x", "middle", color="#c00000", weight="bold"))
    return parts


def _group_width(groups: Sequence[str]) -> float:
    """Return the pixels of a group of bars: an equal part of `WIDTH`, or as many as the longest word below it needs."""
    longest = max((len(word) for name in groups for word in name.split("_")), default=0)
    return max((WIDTH - _LEFT - _RIGHT) / max(1, len(groups)), longest * SMALL * _CHARACTER + _SPACE)


def _tick(largest: float) -> float:
    """Return the distance of three to five lines: 1, 2 or 5 times a power of ten."""
    power: float = 10.0 ** math.floor(math.log10(largest))
    return next(step * power for step in (0.2, 0.5, 1.0, 2.0) if largest / (step * power) <= 5.0)


def _caption(settings: Row, rows: Sequence[Row]) -> list[str]:
    """Return what was measured, on what, and with which versions."""
    tokens, ranks = (
        " and ".join(f"{one:,}" for one in sorted({row[name] for row in rows})) for name in ("seq_len", "ranks")
    )
    marks = "".join(
        text for status, text in (("refused", " No bar: not supported."), ("wrong", " x: wrong or failed."))
        if any(row["status"] == status or (status == "wrong" and row["status"] == "failed") for row in rows)
    )  # fmt: skip
    versions = {"burst-portable": settings["version"], **settings.get("versions", {})}
    versions |= {name: settings[name] for name in ("torch", "triton") if name in settings}
    return [
        f"By visible pairs; the slowest rank counts; median of {settings['rounds']} rounds.{marks}",
        f"{ranks} ranks on {settings.get('device', settings['backend'])}; {tokens} tokens, "
        f"{settings['heads']} query and {settings['kv_heads']} K/V heads, head size {settings['head_dim']}, "
        f"{settings['dtype']}; {settings['layout']} layout",
        "; ".join([*(f"{name} {value}" for name, value in versions.items()), *filter(None, [settings.get("date")])]),
    ]


def page(parts: Sequence[str], height: int, width: int = WIDTH) -> str:
    """Return an SVG file of these elements on white."""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
        f'height="{height}" font-family="Helvetica, Arial, sans-serif" font-size="{_FONT}">\n'
        f'<rect width="100%" height="100%" fill="white"/>\n' + "\n".join(parts) + "\n</svg>\n"
    )


def text_element(
    x: float, y: float, text: Any, anchor: str = "start", *,
    color: str = "black", weight: str = "normal", size: int = _FONT,
) -> str:  # fmt: skip
    """Return a line of text, whose `anchor` (start, middle or end) is at `x`, in pixels."""
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{color}" '
        f'font-weight="{weight}" font-size="{size}">'
        f"{escape(str(text))}</text>"
    )
