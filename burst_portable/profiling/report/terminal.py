"""Print a report in a terminal: summary, partition of each rank, ring steps with the longest waits."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from burst_portable.profiling.analysis.train_steps import training_text
from burst_portable.profiling.clocks import sensor_text
from burst_portable.profiling.intervals import PARTS, largest_contention
from burst_portable.profiling.report.tables import (
    BASIC,
    NAMES,
    ablation_table,
    bottleneck_name,
    drift_text,
    efficiency_table,
    hardware_text,
    kernel_rows,
    peaks_text,
    rank_table,
    step_rows,
    totals,
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
    _show_summary(console, data)
    _show_ranks(console, data)
    _print(console, "  ", _totals(data))
    if found := largest_contention(data):
        rank, ratio = found["rank"], found["ratio"]
        console.print(f"  kernels of rank {rank} take {ratio:.2f} x as long during communication")
    if text := training_text(data):
        _print(console, "  ", text)
    _show_ablation(console, data)
    _show_hardware(console, data)
    if steps := sorted(step_rows(data), key=lambda r: -r["blocking"])[:_MAX_STEPS]:
        console.print(_steps(steps))
    if kernels := kernel_rows(data)[:_MAX_KERNELS]:
        console.print(_kernels(kernels))
    _show_sources(console, data)


def _show_summary(console: Console, data: dict[str, Any]) -> None:
    """Print the largest bottleneck, and what to do about it."""
    summary = data["summary"]
    color = "green" if summary["kind"] == "none" else "red"
    _print(console, f"{bottleneck_name(summary['kind']).upper()}  ", summary["text"], label_style=f"bold {color}")
    if summary["recommendation"]:
        _print(console, "  what to do  ", summary["recommendation"], label_style="bold")


def _show_ranks(console: Console, data: dict[str, Any]) -> None:
    """Print the partition of each rank, with bars if the terminal is wide enough."""
    columns = "rank", "span", "computing", "exposed", "copies", "blocking", "idle"
    ranks = rank_table(data, columns, _MAX_RANKS)
    if console.width < _MIN_WIDTH:
        console.print(_table(*ranks))
    else:
        longest = max(rank["span_ns"] for rank in data["ranks"]) or 1
        bars = (_bar(rank, longest) for rank in data["ranks"])
        rows: list[list[str | Text]] = [[*row, bar] for row, bar in zip(ranks.rows, bars, strict=False)]
        console.print(_table((*columns, "partition"), rows, left=[len(columns)]))
        legend = [(_shade(part, 2), f" {NAMES[part]}") for part in PARTS]
        console.print(Text("  ").join(Text.assemble(*one) for one in [(), *legend]))
    if len(data["ranks"]) > _MAX_RANKS:
        console.print(f"  and {len(data['ranks']) - _MAX_RANKS} ranks more", style="dim")


def _show_ablation(console: Console, data: dict[str, Any]) -> None:
    """Print the steps without communication and without computing, if they were measured."""
    if ablated := data["ablation"]:
        console.print(_table(*ablation_table(data, _MAX_RANKS)))
        repeat = ablated[0]["repeat"]
        console.print(f"  shortest of {repeat} runs; hidden: the overlap of messages and kernels", style="dim")


def _show_hardware(console: Console, data: dict[str, Any]) -> None:
    """Print the efficiency of each rank, the rates with which it is compared, and the sensors of the devices."""
    if data["efficiency"]:
        console.print(_table(*efficiency_table(data, _MAX_RANKS, _roofline)))
        for line in hardware_text(data):
            _print(console, "  planned for ", line, style="dim")
        for line in peaks_text(data):
            _print(console, "  peaks of ", line, style="dim")
    for one in data["sensors"][:_MAX_RANKS]:
        if text := sensor_text(one):
            console.print(f"  rank {one['rank']}: {text}", style="dim", markup=False)


def _show_sources(console: Console, data: dict[str, Any]) -> None:
    """Print what computed and sent, and how the times are known."""
    if data["backend"]:
        used = f"kernels: {', '.join(data['kernels']) or 'none'}; transport: {data['transport']['used'] or 'none'}"
        console.print(f"  backend: {data['backend']}; {used}", style="dim", markup=False)
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
    sums = totals(data)
    rate = scaled(sums["flops"] * 1e9 / sums["compute"], "FLOP/s") if sums["compute"] else "-"
    if data["level"] == "basic":
        return f"in kernels {rate} per rank; {BASIC}"
    hidden = percent(sums["overlap"] / sums["comm"]) if sums["comm"] else "none"
    return f"in kernels {rate} per rank; communication hidden {hidden}; {bytes_text(sums['sent_bytes'])} sent"


def _table(columns: Sequence[str], rows: Iterable[Sequence[str | Text]], left: Collection[int]) -> Table:
    """Return a table. Long cells are folded: a truncated number would be wrong."""
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, header_style="bold")
    for index, name in enumerate(columns):
        table.add_column(name, justify="left" if index in left else "right", overflow="fold")
    for row in rows:
        table.add_row(*(Text(cell) if isinstance(cell, str) else cell for cell in row))  # no markup in names
    return table


def _shade(part: str, length: int) -> tuple[str, str]:
    """Return characters of a part of a bar, and their color."""
    return _SHADES[part] * length, _COLORS[part]


def _bar(rank: dict[str, Any], longest: int) -> Text:
    """Return four shades in proportion to the parts; parts that round to nothing are left out."""
    drawn, done, at = [], 0, 0
    for part in PARTS:
        done += rank[f"{part}_ns"]
        until = round(_BAR * done / longest)
        drawn.append(_shade(part, until - at))
        at = until
    return Text.assemble(*drawn)


def _roofline(row: dict[str, Any]) -> str:
    return "unknown" if row["ceiling_fraction"] is None else f"{percent(row['ceiling_fraction'])}, {row['bound']}"


def _steps(rows: list[dict[str, Any]]) -> Table:
    columns = "ring step", "n", "window", "computing", "blocking", "slowest", "it computes", "received"
    cells = [
        (
            f"{r['pass']} {r['step']}",
            str(r["count"]),
            *(time_text(r[name]) for name in ("span", "compute", "blocking")),
            str(r["slowest"]),
            time_text(r["slowest_compute"]),
            bytes_text(r["received_bytes"]),
        )
        for r in rows
    ]
    return _table(columns, cells, left=[0])


def _kernels(rows: list[dict[str, Any]]) -> Table:
    cells = []
    for r in rows:
        name = r["name"] if len(r["name"]) <= _MAX_NAME else r["name"][: _MAX_NAME - 1] + "…"
        step = f"step {r['most']['ring_step']}"
        cells.append((name, r["pass"], str(r["count"]), time_text(r["time"]), step))
    return _table(("traced kernel", "pass", "n", "time", "most of it at"), cells, left=[0, 1, 4])
