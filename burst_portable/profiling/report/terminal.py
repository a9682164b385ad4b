"""Print a report in a terminal: summary, partition of each rank, ring steps with the longest waits."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from burst_portable.profiling.analysis.analyze import training_text
from burst_portable.profiling.clocks import sensor_text
from burst_portable.profiling.intervals import PARTS, largest_contention
from burst_portable.profiling.report.tables import (
    ABLATED,
    BASIC,
    NAMES,
    bottleneck_name,
    drift_text,
    hardware_text,
    kernel_rows,
    peaks_text,
    rates_text,
    step_rows,
)
from burst_portable.utils.text import beside, bytes_text, percent, scaled, time_text

_COLORS = {"compute": "blue", "exposed_comm": "yellow", "exposed_copy": "magenta", "idle": "bright_black"}
_SHADES = {"compute": "█", "exposed_comm": "▓", "exposed_copy": "▒", "idle": "░"}  # distinct even without colors
_BAR = 16  # characters: with the numbers before it, a line has 80
_MIN_WIDTH = 80  # in narrower terminals, the numbers need the room of the bar
_MAX_STEPS = 8
_MAX_RANKS = 16
_MAX_KERNELS = 8
_MAX_NAME = 38  # characters of a kernel's name


def show(data: dict[str, Any], console: Console | None = None) -> None:
    """Print a report."""
    console = console or Console(highlight=False)
    summary = data["summary"]
    color = "green" if summary["kind"] == "none" else "red"
    _print(console, f"{bottleneck_name(summary['kind']).upper()}  ", summary["text"], label_style=f"bold {color}")
    if summary["recommendation"]:
        _print(console, "  what to do  ", summary["recommendation"], label_style="bold")
    bars = console.width >= _MIN_WIDTH
    console.print(_ranks(data, bars=bars))
    if bars:
        console.print("  " + "  ".join(f"{_shade(part, 2)} {NAMES[part]}" for part in PARTS))
    if len(data["ranks"]) > _MAX_RANKS:
        console.print(f"  and {len(data['ranks']) - _MAX_RANKS} ranks more", style="dim")
    _print(console, "  ", _totals(data))
    if found := largest_contention(data):
        rank, ratio = found["rank"], found["ratio"]
        console.print(f"  kernels of rank {rank} take {ratio:.2f} x as long during communication")
    if text := training_text(data):
        _print(console, "  ", text)
    if ablated := data["ablation"]:
        console.print(_ablation(ablated[:_MAX_RANKS]))
        repeat = ablated[0]["repeat"]
        console.print(f"  shortest of {repeat} runs; hidden: the overlap of messages and kernels", style="dim")
    if data["efficiency"]:
        console.print(_efficiency(data["efficiency"][: 2 * _MAX_RANKS]))
        for line in hardware_text(data):
            _print(console, "  planned for ", line, style="dim")
        for line in peaks_text(data):
            _print(console, "  peaks of ", line, style="dim")
    for one in data["sensors"][:_MAX_RANKS]:
        if text := sensor_text(one):
            console.print(f"  rank {one['rank']}: {text}", style="dim", markup=False)
    if rows := sorted(step_rows(data), key=lambda r: -r["blocking"])[:_MAX_STEPS]:
        console.print(_steps(rows))
    if kernels := kernel_rows(data)[:_MAX_KERNELS]:
        console.print(_kernels(kernels))
    clock = data["clock"]
    uncertain = f", uncertain by {time_text(clock['uncertainty_ns'])}" if clock["uncertainty_ns"] else ""
    drift = f", {text}" if (text := drift_text(data)) else ""
    console.print(
        f"  evidence: {clock['evidence']}, {clock['method']}{uncertain}{drift}; FLOPs and bytes from the plan",
        style="dim",
        markup=False,
    )


def _print(console: Console, label: str, text: str, *, label_style: str = "", style: str = "") -> None:
    """Print a label and a text; on a terminal, further lines are indented to the start of the text."""
    text = beside(label, text, console.width if console.is_terminal else None)
    console.print(Text.assemble((label, label_style or style), (text, style)), soft_wrap=True)


def _totals(data: dict[str, Any]) -> str:
    """Return rates and totals over all ranks as text."""
    names = ("comm_ns", "overlap_ns", "compute_ns", "sent_bytes")
    sums = {name: sum(r[name] for r in data["ranks"]) for name in names}
    flops = sum(p["flops"] for r in data["ranks"] for p in r["passes"].values())
    rate = scaled(flops * 1e9 / sums["compute_ns"], "FLOP/s") if sums["compute_ns"] else "-"
    if data["level"] == "basic":
        return f"in kernels {rate} per rank; {BASIC}"
    hidden = percent(sums["overlap_ns"] / sums["comm_ns"]) if sums["comm_ns"] else "none"
    return f"in kernels {rate} per rank; communication hidden {hidden}; {bytes_text(sums['sent_bytes'])} sent"


def _ranks(data: dict[str, Any], *, bars: bool) -> Table:
    names = "rank", "span", "computing", "exposed", "copies", "blocking", "idle"
    table = _table(*names, *(["partition"] if bars else []), left=[7])
    table.columns[0].justify = "right"
    longest = max(rank["span_ns"] for rank in data["ranks"]) or 1
    for rank in data["ranks"][:_MAX_RANKS]:
        table.add_row(
            str(rank["rank"]),
            time_text(rank["span_ns"]),
            time_text(rank["compute_ns"]),
            time_text(rank["exposed_comm_ns"]),
            "-" if data["level"] == "basic" else time_text(rank["exposed_copy_ns"]),
            time_text(rank["blocking_ns"]),
            time_text(rank["idle_ns"]),
            *([_bar(rank, longest)] if bars else []),
        )
    return table


def _table(*columns: str, left: Collection[int] = ()) -> Table:
    """Return an empty table whose first column and those of `left` are text, and other columns numbers.

    Long cells are folded: a truncated number would be wrong.
    """
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, header_style="bold")
    for index, name in enumerate(columns):
        table.add_column(name, justify="left" if index == 0 or index in left else "right", overflow="fold")
    return table


def _shade(part: str, length: int) -> str:
    return f"[{_COLORS[part]}]{_SHADES[part] * length}[/]"


def _bar(rank: dict[str, Any], longest: int) -> str:
    """Return four shades in proportion to the parts; parts that round to nothing are left out."""
    drawn, done, at = [], 0, 0
    for part in PARTS:
        done += rank[f"{part}_ns"]
        until = round(_BAR * done / longest)
        if until > at:
            drawn.append(_shade(part, until - at))
        at = until
    return "".join(drawn)


def _ablation(rows: list[dict[str, Any]]) -> Table:
    table = _table("ablation", *ABLATED.values())
    for r in rows:
        table.add_row(f"rank {r['rank']}", *(time_text(r[name]) for name in ABLATED))
    return table


def _efficiency(rows: list[dict[str, Any]]) -> Table:
    table = _table("efficiency", "in kernels", "planned", "sent", "planned", "of the roofline")
    for r in rows:
        sent = "-" if r["sent_bytes"] is None else bytes_text(r["sent_bytes"])
        share = "unknown" if r["ceiling_fraction"] is None else f"{percent(r['ceiling_fraction'])}, {r['bound']}"
        label = escape(f"rank {r['rank']} {r['pass']}")
        table.add_row(label, *rates_text(r), sent, bytes_text(r["planned_sent_bytes"]), share)
    return table


def _steps(rows: list[dict[str, Any]]) -> Table:
    table = _table("ring step", "n", "window", "computing", "blocking", "slowest", "it computes", "received")
    for r in rows:
        table.add_row(
            escape(f"{r['pass']} {r['step']}"),
            str(r["count"]),
            time_text(r["span"]),
            time_text(r["compute"]),
            time_text(r["blocking"]),
            str(r["slowest"]),
            time_text(r["slowest_compute"]),
            bytes_text(r["received_bytes"]),
        )
    return table


def _kernels(rows: list[dict[str, Any]]) -> Table:
    table = _table("traced kernel", "pass", "n", "time", "most of it at", left=[1, 4])
    for r in rows:
        name = r["name"] if len(r["name"]) <= _MAX_NAME else r["name"][: _MAX_NAME - 1] + "…"
        step = f"step {r['most']['ring_step']}"
        table.add_row(escape(name), escape(r["pass"]), str(r["count"]), time_text(r["time"]), step)
    return table
