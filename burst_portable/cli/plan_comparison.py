"""`burst-portable plan --strategy all`: the plans of all strategies that serve a call, side by side. Needs no torch.

==================  ==========================================================================================
schema              "burst_portable.plans/2"; a change that breaks readers counts it up
problem, hardware   as `plan` writes them, see `cli.plan_facts`
sampled_ranks       ranks over which the numbers below are taken: all, or a sample
chosen              what `auto` says: which of them it takes, and why
strategies          a list, by predicted time: `label` as `auto` calls it, `strategy`, `title`, `reason`; `seconds`,
                    forward and backward, and by "forward" and "backward": `sent_bytes`, `launches` (most of a rank),
                    `imbalance` (largest over mean FLOPs of a rank), `seconds` (of the slowest rank)
not_compared        strategies that `auto` leaves out because no ranks per node were given; listed with their defaults
refused             by label: why a strategy cannot serve
==================  ==========================================================================================
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from rich.console import Console
from rich.table import Table
from rich.text import Text

from burst_portable import __version__
from burst_portable.cli.output import labelled, table
from burst_portable.cli.plan_facts import Facts, call_facts, hardware_facts, sampled_ranks
from burst_portable.planning.cost import plan_cost
from burst_portable.planning.hardware import HardwareSpec
from burst_portable.planning.plans import PASSES, Plan
from burst_portable.strategies.auto import AutoStrategy
from burst_portable.strategies.base import Strategy
from burst_portable.strategies.registry import checked_plan, classes, collect_reason, has_option
from burst_portable.utils.text import bytes_text, seconds_text

ALL = "all"
"""The value of `--strategy` for a comparison."""
SCHEMA = "burst_portable.plans/2"


def comparison_facts(chosen: Plan, auto: Strategy, hardware: HardwareSpec) -> Facts:
    """Return what each strategy would do with a call, and what it costs. `chosen`: the plan that `auto` made for it."""
    assert isinstance(auto, AutoStrategy), "it lists the candidates"
    call = chosen.call
    ranks = sampled_ranks(call.ranks, 0)
    served = []
    candidates, refused = auto.list_candidates(call)
    for label, strategy in _every(candidates, refused).items():
        with collect_reason(strategy.name, label, refused):
            plan = checked_plan(strategy, call)
            served.append({"label": label, "title": strategy.title, **_costs(plan, hardware, ranks)})
    return {
        "schema": SCHEMA,
        "version": __version__,
        "problem": call_facts(call),
        "hardware": hardware_facts(hardware),
        "sampled_ranks": list(ranks),
        "chosen": chosen.reason,
        "not_compared": _needs_inner(candidates, auto) if call.ranks > 1 else [],
        "strategies": sorted(served, key=lambda one: one["seconds"]),
        "refused": refused,
    }


def _every(compared: Mapping[str, Strategy], refused: Iterable[str]) -> dict[str, Strategy]:
    """Return what `auto` compares, and the other strategies with their default options, by label."""
    found = {strategy.name for strategy in compared.values()} | {"auto", *refused}
    return {**compared, **{name: strategy() for name, strategy in classes().items() if name not in found}}


def _needs_inner(compared: Mapping[str, Strategy], auto: AutoStrategy) -> list[str]:
    """Return the names of the strategies that `auto` compares only if it is told the ranks per node."""
    if auto.ranks_per_node is not None:
        return []
    found = {strategy.name for strategy in compared.values()} | {"auto"}
    return [n for n, one in classes().items() if one.exact and n not in found and has_option(n, "ranks_per_node")]


def _costs(plan: Plan, hardware: HardwareSpec, ranks: tuple[int, ...]) -> Facts:
    cost = plan_cost(plan, hardware, ranks)
    passes = {
        name: {
            "sent_bytes": max(one.sent for one in cost.per_rank[name]),
            "launches": max(one.launches for one in cost.per_rank[name]),
            "imbalance": cost.imbalance(name),
            "seconds": max(one.seconds for one in cost.per_rank[name]),
        }
        for name in PASSES
    }
    return {"strategy": plan.strategy, "reason": plan.reason, "seconds": cost.seconds, "passes": passes}


def show_comparison(console: Console, facts: Facts) -> None:
    """Print a row for each strategy, then what `auto` takes, and why the others cannot serve."""
    columns = ("strategy", "sent, forward", "backward", "launches", "imbalance", "forward", "backward", "together")
    rows = table(*columns, left=("strategy",), title="by predicted time; bytes and launches of the rank that has most")
    for one in facts["strategies"]:
        forward, backward = (one["passes"][name] for name in PASSES)
        rows.add_row(
            Text(one["label"]),
            bytes_text(forward["sent_bytes"]),
            bytes_text(backward["sent_bytes"]),
            f"{forward['launches']} + {backward['launches']}",
            f"{forward['imbalance']:.3f}",
            *(seconds_text(seconds) for seconds in (forward["seconds"], backward["seconds"], one["seconds"])),
        )
    console.print(rows, "")
    titles = Table.grid(padding=(0, 1, 0, 0))
    for name, title in {one["strategy"]: one["title"] for one in facts["strategies"]}.items():
        titles.add_row(Text(name), Text(title))
    console.print(titles, "")
    parts = facts["chosen"].split("; ")  # the times that it lists are those of the table
    chosen = [part.partition(" (")[0] for part in parts if not part.startswith("not ")]
    console.print(labelled("auto", "; ".join(chosen[: 1 + chosen[0].startswith("layout ")])))
    if names := facts["not_compared"]:
        console.print(labelled("", f"not compared without --ranks-per-node: {', '.join(names)}"))
    for label, reason in facts["refused"].items():
        console.print(labelled("not", f"{label}: {reason}"))
