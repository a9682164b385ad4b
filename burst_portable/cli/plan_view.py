"""Print the facts of a plan as tables and a drawing of the score matrix."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from burst_portable.cli.drawing import (
    SEVERAL,
    SHADES,
    Cell,
    cell_owners,
    cell_ranks,
    rank_label,
    ranks_text,
    score_matrix,
    use_shades,
)
from burst_portable.cli.output import labelled, table
from burst_portable.cli.plan_facts import Facts
from burst_portable.planning.plans import PASSES, Plan
from burst_portable.utils.text import bytes_text, percent, scaled, seconds_text

# Of medium lightness: readable on light and dark backgrounds, and under white digits.
_COLORS = ("#2f6fde", "#c8690f", "#17855c", "#b5469e", "#0d8499", "#d2453f", "#8f7500", "#7a5fd0")
_SHARES = ("all pairs of the cell", "from 2/3", "from 1/3", "fewer")  # by shade


def show(console: Console, plan: Plan, facts: Facts, *, steps: int) -> None:
    """Print the call, the score matrix, at most `steps` steps of each pass, the costs and the predicted time."""
    _header(console, facts)
    _drawing(console, plan)
    for name in PASSES:
        console.print(_steps_table(facts, name, plan.describe_pass(name), steps), "")
    console.print(_costs_table(facts), "")
    _time_note(console, facts)


def show_check(console: Console, facts: Facts) -> None:
    """Print the outcome of the verification."""
    outcome = facts["check"]
    if not outcome["done"]:
        console.print(labelled("check", Text.assemble(("skipped", "yellow"), ": --no-check, the plan is not verified")))
    elif outcome["ok"]:
        ranks, verified = facts["problem"]["ranks"], outcome["ranks"]
        result = "every query-key pair computed exactly once, every send "
        if verified == ranks:
            result += "matched by a receive, every gradient returned to its owner"
            scope = f"all {ranks:,} ranks" if ranks > 1 else "one rank"
        else:
            result += "between them matched by a receive"
            scope = f"a sample, {verified} of {ranks:,} ranks; --check-all verifies all"
        console.print(labelled("check", Text.assemble(("ok", "green"), f": {result} ({scope})")))
    else:
        console.print(labelled("check", Text.assemble(("FAILED", "red"), ":")))
        for problem in outcome["wrong"]:
            console.print(f"  {problem}", markup=False)


def _header(console: Console, facts: Facts) -> None:
    p = facts["problem"]
    share = p["num_pairs"] / p["seq_len"] ** 2
    sizes = f"batch {p['batch']}, {p['heads']} query and {p['kv_heads']} K/V heads of {p['head_dim']}"
    values = f" (values {p['v_head_dim']})" if p["v_head_dim"] != p["head_dim"] else ""
    call = (
        f" over {p['ranks']:,} rank{'' if p['ranks'] == 1 else 's'}, layout {p['layout']}, {p['seq_len']:,} tokens, "
        f"{sizes}{values}, {p['itemsize']} bytes per element"
    )
    console.print(labelled("plan", Text.assemble((facts["strategy"], "bold"), call)))
    masked = p["fully_masked_tokens"]
    note = f"; {masked:,} tokens are fully masked, their output is 0" if masked else ""
    console.print(labelled("mask", f"{p['mask']}: {p['num_pairs']:,} pairs per head, {100 * share:.3f} % of all{note}"))
    if facts["reason"]:
        console.print(labelled("reason", facts["reason"]))


# ------------------------------------------------------------------------------------------------- drawing


def _drawing(console: Console, plan: Plan) -> None:
    problem = plan.call
    matrix = score_matrix(problem.mask, problem.layout)
    console.print()
    console.print("score matrix", style="bold")
    if use_shades(matrix):
        for row, ranks in zip(matrix, cell_ranks(problem.layout), strict=True):
            shades = ((cell.shade, "" if cell.visible else "dim") for cell in row)
            console.print(Text.assemble("       ", *shades, f"  {ranks_text(ranks)}"))
        console.print("       rows are queries, columns are keys; each row ends with the ranks of its queries")
        legend = ", ".join(f"{shade * 2}: {part}" for shade, part in zip(SHADES[::-1], _SHARES, strict=True))
        console.print(f"       {legend}, ·: none\n")
        return
    owners = ((f"{rank_label(rank)} ", _color(rank)) for rank in cell_owners(problem.k_layout))
    console.print(Text.assemble("  keys ", *owners))
    for row in matrix:
        console.print(Text.assemble("       ", *((cell.text, _style(cell)) for cell in row)))
    has_several = any(rank_label(cell.rank) == SEVERAL for row in matrix for cell in row)
    several = f"; {SEVERAL}: of several ranks" if has_several else ""
    console.print("       rows are queries, columns are keys; digit and color are their ranks")
    console.print(f"       00: all pairs of the cell, 0: some, ·: none{several}\n")


def _style(cell: Cell) -> str:
    if not cell.visible:
        return "dim"
    color = _color(cell.rank)
    return f"#ffffff on {color}" if cell.visible == 1 else color


def _color(rank: int | None) -> str:
    return "grey50" if rank is None else _COLORS[rank % len(_COLORS)]


# --------------------------------------------------------------------------------------------------- steps


def _steps_table(facts: Facts, name: str, title: str, limit: int) -> Table:
    steps = facts["steps"][name]
    rank = facts["steps"]["rank"]
    columns = ("step", "receives", "computes", "tiles", "pairs", "sends", "sent")
    left = ("receives", "computes", "tiles", "sends")
    rows = table(*columns, left=left, title=f"{name} on rank {rank}: {title}")
    for column in rows.columns:
        if column.header not in ("receives", "sends"):
            column.no_wrap, column.overflow = True, "ellipsis"
    for step in steps[:limit]:
        rows.add_row(*_step_row(step))
    if len(steps) > limit:
        rows.add_row("…", f"{len(steps) - limit:,} more", *[""] * 5)
    return rows


def _step_row(step: Facts) -> tuple[str, ...]:
    sends = [*step["sends"], *step["result_sends"]]
    receives = [*step["receives"], *step["result_receives"]]
    return (
        str(step["step"]),
        ", ".join(f"{m['what']} ← {m['rank']}" for m in receives),
        *_compute_columns(step["compute"]),
        _joined([f"{m['what']} → {m['rank']}" for m in sends]),
        bytes_text(sum(m["bytes"] for m in sends)) if sends else "",
    )


def _compute_columns(compute: Facts | None) -> tuple[str, ...]:
    if compute is None:
        return ("",) * 3
    kinds = [f"{compute[f'{kind}_tiles']} {kind}" for kind in ("full", "masked") if compute[f"{kind}_tiles"]]
    return compute["label"], " + ".join(kinds), f"{compute['num_pairs']:,}"


def _joined(parts: list[str]) -> str:
    """Join the first few texts: a rank may send a thousand blocks in one step."""
    return ", ".join(parts) if len(parts) <= 4 else f"{', '.join(parts[:3])} and {len(parts) - 3:,} more"


# --------------------------------------------------------------------------------------------------- costs


def _costs_table(facts: Facts) -> Table:
    passes = [facts["passes"][name] for name in PASSES]
    rows = table(f"costs over {_ranks_text(facts)}", *PASSES)
    for label, value in _COST_ROWS.items():
        values = [value(part) for part in passes]
        if any(values):
            rows.add_row(label, *values)
    return rows


def _ranks_text(facts: Facts) -> str:
    ranks, sampled = facts["problem"]["ranks"], facts["sampled_ranks"]
    if len(sampled) == ranks:
        return f"all {ranks:,} ranks" if ranks > 1 else "one rank"
    return f"{len(sampled)} of {ranks:,} ranks: {', '.join(map(str, sampled))}"


def _max_mean(key: str, text: Any) -> Any:
    return lambda part: f"{text(part['max'][key])} / {text(part['mean'][key])}"


_COST_ROWS = {
    "FLOPs per rank, max / mean": _max_mean("flops", lambda x: scaled(x, "FLOP")),
    "imbalance (max / mean)": lambda part: f"{part['imbalance']:.3f}",
    "sent per rank, max / mean": _max_mean("sent_bytes", bytes_text),
    "received per rank, max / mean": _max_mean("received_bytes", bytes_text),
    "largest message": lambda part: "-" if part["max_message_bytes"] is None else bytes_text(part["max_message_bytes"]),
    "messages per rank, max": lambda part: f"{part['max']['messages']:,}",
    "kernel launches, max": lambda part: f"{part['max']['launches']:,}",
    "tiles per rank, max": lambda part: f"{part['max']['tiles']:,}",
    "memory: peak per rank": lambda part: bytes_text(part["memory"]["peak"]),
    "memory: local tensors": lambda part: bytes_text(part["memory"]["shard"]),
    "memory: remote blocks": lambda part: bytes_text(part["memory"]["in_flight"]),
    "memory: rows of scores": lambda part: bytes_text(part["memory"]["scores"]) if part["memory"]["scores"] else "",
    "predicted time": lambda part: seconds_text(part["seconds"]),
    "computation only": lambda part: seconds_text(part["compute_seconds"]),
    "predicted efficiency": lambda part: percent(part["efficiency"]),
}


def _time_note(console: Console, facts: Facts) -> None:
    hardware = facts["hardware"]
    between_nodes = ""
    if hardware["ranks_per_node"]:
        origin = f"{hardware['inter_node_source']} " if hardware["inter_node_source"] else ""
        rate = f"{origin}{hardware['inter_node_bandwidth']:.4g} GB/s"
        between_nodes = f"; {rate} between nodes of {hardware['ranks_per_node']}"
    speeds = f"{hardware['tflops']:.4g} TFLOP/s and {hardware['intra_node_bandwidth']:.4g} GB/s per rank"
    predicted = f"forward and backward, predicted (not measured) for {speeds}"
    source = f", {hardware['source']}" if hardware["source"] else ""
    console.print(labelled("time", f"{seconds_text(facts['seconds'])} {predicted}{source}{between_nodes}"))
    for note in facts["notes"]:
        console.print(labelled("note", note))
