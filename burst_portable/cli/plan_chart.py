"""Draw the comparison of `burst-portable plan --strategy all` as SVG: a row per strategy, a column of bars per cost.

Costs are those of the table: predicted time, bytes sent, memory and imbalance, each of the rank with the largest value.
The bars of time, bytes and launches have one part per pass. It is readable at half its width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape
from typing import NamedTuple

from burst_portable.bench.chart import COLORS, LINE, SMALL, WIDTH, page, text_element
from burst_portable.cli.plan_comparison import choice_text
from burst_portable.cli.plan_facts import Facts
from burst_portable.planning.plans import PASSES
from burst_portable.utils.text import bytes_text, seconds_text

_EDGE, _GAP, _NUMBER = 12, 14, 84  # pixels: of the margin, between columns, and of the number after a bar
_BAR, _ROW = 16, 52  # heights: of a bar, and of a strategy with its label above the bars


class _Column(NamedTuple):
    title: str
    parts: Callable[[Facts], Sequence[float]]  # lengths of the parts of a bar
    number: Callable[[float], str]  # text of their sum


def _by_pass(key: str) -> Callable[[Facts], Sequence[float]]:
    return lambda one: [one["passes"][name][key] for name in PASSES]


def _memory(one: Facts) -> Sequence[float]:
    return [max(one["passes"][name]["memory"]["peak"] for name in PASSES)]


def _imbalance(one: Facts) -> Sequence[float]:
    return [one["passes"]["forward"]["imbalance"]]


_COLUMNS = (
    _Column("predicted time", _by_pass("seconds"), seconds_text),
    _Column("bytes sent", _by_pass("sent_bytes"), bytes_text),
    _Column("launches", _by_pass("launches"), "{:.0f}".format),
    _Column("memory", _memory, bytes_text),
    _Column("imbalance", _imbalance, "{:.3f}".format),
)
_WIDTH_EACH = (WIDTH - 2 * _EDGE - (len(_COLUMNS) - 1) * _GAP) // len(_COLUMNS)


def draw_comparison(facts: Facts) -> str:
    """Return the picture of the facts of `plan_comparison.comparison_facts`."""
    strategies = facts["strategies"]
    parts: list[str] = []
    x = _EDGE
    for name, color in zip(PASSES, COLORS, strict=False):
        parts += [f'<rect x="{x}" y="10" width="16" height="16" fill="{color}"/>', text_element(x + 22, 24, name)]
        x += 130
    parts.append(text_element(x, 24, "memory: of the pass that needs more; imbalance: forward", size=SMALL))
    top = 2 * LINE + 14
    for i, column in enumerate(_COLUMNS):
        x = _EDGE + i * (_WIDTH_EACH + _GAP)
        parts.append(text_element(x, top, column.title, weight="bold"))
        largest = max((sum(column.parts(one)) for one in strategies), default=0.0) or 1.0
        for row, one in enumerate(strategies):
            y = top + (row + 1) * _ROW - _BAR
            parts += _bar(column, one, x, y, (_WIDTH_EACH - _NUMBER) / largest)
    for row, one in enumerate(strategies):
        parts.append(text_element(_EDGE, top + (row + 1) * _ROW - _BAR - 6, one["label"], size=SMALL))
    top += len(strategies) * _ROW + 10
    for line in _caption(facts):
        top += LINE
        parts.append(text_element(_EDGE, top, line, size=SMALL))
    return page(parts, top + 14)


def _bar(column: _Column, one: Facts, x: float, y: int, scale: float) -> list[str]:
    """Return the parts of a strategy's bar, one color each, and its number."""
    found, values = [], column.parts(one)
    for value, color in zip(values, COLORS, strict=False):
        title = escape(f"{one['label']}, {column.title}: {column.number(value)}")
        found.append(
            f'<rect x="{x:.1f}" y="{y}" width="{value * scale:.1f}" height="{_BAR}" fill="{color}">'
            f"<title>{title}</title></rect>"
        )
        x += value * scale
    return [*found, text_element(x + 6, y + _BAR - 2, column.number(sum(values)), size=SMALL)]


def _caption(facts: Facts) -> list[str]:
    """Return the call, the rates of the prediction, the choice of `auto`, and the strategies without a row."""
    problem, hardware = facts["problem"], facts["hardware"]
    speeds = f"{hardware['tflops']:g} TFLOP/s, {hardware['intra_node_bandwidth']:g} GB/s between ranks"
    if hardware["ranks_per_node"]:
        speeds += f", {hardware['inter_node_bandwidth']:g} GB/s between nodes of {hardware['ranks_per_node']}"
    lines = [
        f"{problem['ranks']:,} ranks, {problem['seq_len']:,} tokens, {problem['heads']} query and "
        f"{problem['kv_heads']} K/V heads, head size {problem['head_dim']}; {problem['layout']} layout; "
        f"mask {_shortened(problem['mask'])}",
        f"Predicted{' at rates ' + hardware['source'] if hardware['source'] else ''}: {speeds}; "
        f"burst-portable {facts['version']}",
        f"auto: {choice_text(facts)}",
    ]
    if facts["not_compared"]:
        lines.append(f"Not compared by auto: {', '.join(facts['not_compared'])}")
    if facts["unsupported"]:
        lines.append(f"No row, call not supported: {', '.join(facts['unsupported'])}")
    return lines


def _shortened(text: str, most: int = 60) -> str:
    return text if len(text) <= most else f"{text[: most - 3]}..."
