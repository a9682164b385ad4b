"""The report in a terminal: the verdict first, then where each rank's time went, then the steps that lost most."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from burst_portable.profiling.analysis.analyze import training_text
from burst_portable.profiling.clocks import told
from burst_portable.profiling.intervals import PARTS, contended
from burst_portable.profiling.report.tables import (
    ABLATED,
    LIGHT,
    NAMES,
    drift_text,
    hardware_text,
    loss_name,
    peaks_text,
    step_rows,
    traced_rows,
)
from burst_portable.utils.text import beside, bytes_text, percent, scaled, time_text

_COLOURS = {"compute": "blue", "exposed_comm": "yellow", "exposed_copy": "magenta", "idle": "bright_black"}
_SHADES = {"compute": "█", "exposed_comm": "▓", "exposed_copy": "▒", "idle": "░"}  # distinct even without colours
_BAR = 16  # characters: with the numbers beside it, a line has 80
_WIDE = 80  # where a terminal is narrower, numbers need the room of the bar
_STEPS = 8
_RANKS = 16
_KERNELS = 8
_NAME = 38  # characters of a kernel's name


def show(data: dict[str, Any], console: Console | None = None) -> None:
    """Print a report."""
    say = console or Console(highlight=False)
    verdict = data["verdict"]
    colour = "green" if verdict["kind"] == "none" else "red"
    _tell(say, f"{loss_name(verdict['kind']).upper()}  ", verdict["text"], label_style=f"bold {colour}")
    if verdict["advice"]:
        _tell(say, "  what to do  ", verdict["advice"], label_style="bold")
    bars = say.width >= _WIDE
    say.print(_ranks(data, bars=bars))
    if bars:
        say.print("  " + "  ".join(f"{_shade(part, 2)} {NAMES[part]}" for part in PARTS))
    if len(data["ranks"]) > _RANKS:
        say.print(f"  and {len(data['ranks']) - _RANKS} ranks more", style="dim")
    _tell(say, "  ", _totals(data))
    if beside := contended(data):
        say.print(f"  beside communication, kernels of rank {beside['rank']} take {beside['ratio']:.2f} x as long")
    if text := training_text(data):
        _tell(say, "  ", text)
    if ablated := data.get("ablation"):
        say.print(_ablation(ablated[:_RANKS]))
        say.print(f"  shortest of {ablated[0]['repeat']} runs; hidden: what either hides of the other", style="dim")
    if data.get("achieved"):
        say.print(_achieved(data["achieved"][: 2 * _RANKS]))
        for line in hardware_text(data):
            _tell(say, "  planned for ", line, style="dim")
        for line in peaks_text(data):
            _tell(say, "  peaks of ", line, style="dim")
    for one in data.get("sensors", ())[:_RANKS]:
        if text := told(one):
            say.print(f"  rank {one['rank']}: {text}", style="dim", markup=False)
    if rows := sorted(step_rows(data), key=lambda r: -r["blocking"])[:_STEPS]:
        say.print(_steps(rows))
    if traced := traced_rows(data)[:_KERNELS]:
        say.print(_traced(traced))
    clock = data["clock"]
    uncertain = f", uncertain by {time_text(clock['uncertainty_ns'])}" if clock["uncertainty_ns"] else ""
    drift = f", {text}" if (text := drift_text(data)) else ""
    say.print(
        f"  evidence: {clock['evidence']}, {clock['method']}{uncertain}{drift}; FLOPs and bytes from the plan",
        style="dim",
        markup=False,
    )


def _tell(say: Console, label: str, text: str, *, label_style: str = "", style: str = "") -> None:
    """A word and what is told of it, in one line; on a terminal, further lines stand below the text."""
    text = beside(label, text, say.width if say.is_terminal else None)
    say.print(Text.assemble((label, label_style or style), (text, style)), soft_wrap=True)


def _totals(data: dict[str, Any]) -> str:
    """What all ranks reach together."""
    sums = {name: sum(r[name] for r in data["ranks"]) for name in ("comm", "overlap", "compute", "sent_bytes")}
    flops = sum(p["flops"] for r in data["ranks"] for p in r["passes"].values())
    rate = scaled(flops * 1e9 / sums["compute"], "FLOP/s") if sums["compute"] else "-"
    if data.get("light"):
        return f"in kernels {rate} a rank; {LIGHT}"
    hidden = percent(sums["overlap"] / sums["comm"]) if sums["comm"] else "none"
    return f"in kernels {rate} a rank; communication hidden {hidden}; {bytes_text(sums['sent_bytes'])} sent"


def _ranks(data: dict[str, Any], *, bars: bool) -> Table:
    names = "rank", "span", "computing", "exposed", "copies", "blocking", "idle"
    table = _table(*names, *(["where it went"] if bars else []), left=[7])
    table.columns[0].justify = "right"
    longest = max(rank["span"] for rank in data["ranks"]) or 1
    for rank in data["ranks"][:_RANKS]:
        table.add_row(
            str(rank["rank"]),
            time_text(rank["span"]),
            time_text(rank["compute"]),
            time_text(rank["exposed_comm"]),
            "-" if data.get("light") else time_text(rank["exposed_copy"]),
            time_text(rank["blocking"]),
            time_text(rank["idle"]),
            *([_bar(rank, longest)] if bars else []),
        )
    return table


def _table(*columns: str, left: Collection[int] = ()) -> Table:
    """An empty table; its first column and those of `left` are words, the others numbers.

    What does not fit goes on below: a number that is cut is another number.
    """
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, header_style="bold")
    for index, name in enumerate(columns):
        table.add_column(name, justify="left" if index == 0 or index in left else "right", overflow="fold")
    return table


def _shade(part: str, length: int) -> str:
    return f"[{_COLOURS[part]}]{_SHADES[part] * length}[/]"


def _bar(rank: dict[str, Any], longest: int) -> str:
    """Four shades in proportion; parts that round to nothing are not drawn."""
    drawn, done, at = [], 0, 0
    for part in PARTS:
        done += rank[part]
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


def _achieved(rows: list[dict[str, Any]]) -> Table:
    table = _table("achieved", "in kernels", "planned", "sent", "planned", "of the roofline")
    for r in rows:
        hardware = (scaled(r[key], "FLOP/s") if r[key] else "-" for key in ("flop_rate", "planned_flop_rate"))
        sent = "-" if r["sent"] is None else bytes_text(r["sent"])
        share = "unknown" if r["of_ceiling"] is None else f"{percent(r['of_ceiling'])}, {r['bound']}"
        table.add_row(escape(f"rank {r['rank']} {r['pass']}"), *hardware, sent, bytes_text(r["planned_sent"]), share)
    return table


def _steps(rows: list[dict[str, Any]]) -> Table:
    table = _table("ring step", "n", "window", "computing", "blocking", "slowest", "it computes", "received")
    for r in rows:
        table.add_row(
            escape(f"{r['pass']} {r['step']}"),
            str(r["times"]),
            time_text(r["span"]),
            time_text(r["compute"]),
            time_text(r["blocking"]),
            str(r["slowest"]),
            time_text(r["slowest_compute"]),
            bytes_text(r["received_bytes"]),
        )
    return table


def _traced(rows: list[dict[str, Any]]) -> Table:
    table = _table("the tracer saw", "pass", "n", "time", "most of it at", left=[1, 4])
    for r in rows:
        name = r["name"] if len(r["name"]) <= _NAME else r["name"][: _NAME - 1] + "…"
        where = f"step {r['most']['step']}"
        table.add_row(escape(name), escape(r["pass"]), str(r["times"]), time_text(r["time"]), where)
    return table
