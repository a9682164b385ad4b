"""Compare the plans of all strategies for `burst-portable plan --strategy all`; docs/plans.md describes the JSON."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from itertools import pairwise

from rich.console import Console
from rich.table import Table
from rich.text import Text

from burst_portable import __version__
from burst_portable.cli.output import labelled, table
from burst_portable.cli.plan_facts import Facts, call_facts, hardware_facts, memory_facts, sampled_ranks
from burst_portable.errors import MemoryLimitError, UnsupportedError
from burst_portable.planning.cost import plan_cost
from burst_portable.planning.hardware import HardwareSpec
from burst_portable.planning.plans import PASSES, Plan
from burst_portable.strategies.auto import AutoStrategy
from burst_portable.strategies.base import Strategy
from burst_portable.strategies.checked_plans import verified_plan
from burst_portable.strategies.registry import classes, collect_reason
from burst_portable.utils.text import bytes_text, seconds_text

ALL = "all"
"""The value of `--strategy` for a comparison."""
SCHEMA = "burst_portable.plans/6"


def unlimited(auto: Strategy) -> Strategy:
    """Return `auto` without its limit of memory."""
    assert isinstance(auto, AutoStrategy), "only it has a limit"
    return replace(auto, max_memory_mib=None)


def comparison_facts(
    chosen: Plan, auto: Strategy, hardware: HardwareSpec, too_large: MemoryLimitError | None = None
) -> Facts:
    """Return the costs of each strategy for the call of the plan that `auto` made.

    If no strategy fits in the memory limit, `too_large` is the error of `auto`. The costs then include all that exceed
    it, by memory.
    """
    assert isinstance(auto, AutoStrategy), "it lists the candidates"
    call = chosen.call
    ranks = sampled_ranks(call.ranks, 0)
    costs: list[Facts] = []

    def order(one: Facts) -> tuple[bool, bool, float]:
        return one["label"] != chosen.label, not one["compared"], one["seconds"]

    candidates, unsupported = auto.list_candidates(call)
    for label, strategy in _all_strategies(candidates, unsupported).items():
        with collect_reason(strategy.name, label, unsupported):
            plan = verified_plan(strategy, call)
            named = {"label": label, "title": strategy.title, "compared": label in candidates}
            row = {**named, **_costs(plan, hardware, ranks)}
            if too_large is not None:
                costs.append(row)
            if auto.max_memory_mib is not None and (peak := _peak(row)) > auto.max_memory_mib << 20:
                limit = bytes_text(auto.max_memory_mib << 20)
                raise UnsupportedError(f"it needs {bytes_text(peak)} per rank; the limit is {limit}")
            if too_large is None:
                costs.append(row)
    return {
        "schema": SCHEMA,
        "version": __version__,
        "problem": call_facts(call),
        "hardware": hardware_facts(hardware),
        "sampled_ranks": list(ranks),
        "chosen": chosen.reason if too_large is None else f"chose none: {too_large}",
        "not_compared": _not_compared(one["strategy"] for one in costs if not one["compared"]),
        "strategies": sorted(costs, key=order if too_large is None else _peak),
        "unsupported": unsupported,
    }


def _peak(row: Facts) -> int:
    """Return the memory of the pass that needs more."""
    return max(int(row["passes"][name]["memory"]["peak"]) for name in PASSES)


def _all_strategies(compared: Mapping[str, Strategy], unsupported: Iterable[str]) -> dict[str, Strategy]:
    """Return the strategies that `auto` compares, and all remaining ones with default options, by label."""
    found = {strategy.name for strategy in compared.values()} | {"auto", *unsupported}
    return {**compared, **{name: strategy() for name, strategy in classes().items() if name not in found}}


def _not_compared(names: Iterable[str]) -> dict[str, str]:
    """Return when `auto` compares each of these strategies, by name."""
    every = classes()
    inexact = "never: it computes another mask than asked for"
    return {name: (every[name].offered or "not for this call") if every[name].exact else inexact for name in names}


def _costs(plan: Plan, hardware: HardwareSpec, ranks: tuple[int, ...]) -> Facts:
    cost = plan_cost(plan, hardware, ranks)
    passes = {
        name: {
            "sent_bytes": max(one.sent for one in cost.per_rank[name]),
            "launches": max(one.launches for one in cost.per_rank[name]),
            "imbalance": cost.imbalance(name),
            "memory": memory_facts(plan, name, cost.per_rank[name], ranks, hardware),
            "seconds": max(one.seconds for one in cost.per_rank[name]),
        }
        for name in PASSES
    }
    return {"strategy": plan.strategy, "reason": plan.reason, "seconds": cost.seconds, "passes": passes}


def show_comparison(console: Console, facts: Facts) -> None:
    """Print a row for each strategy, the choice of `auto`, and why other strategies do not support the call."""
    columns = (
        "strategy",
        "sent, forward",
        "backward",
        "launches",
        "imbalance",
        "memory",
        "forward",
        "backward",
        "total",
    )
    fits = not facts["chosen"].startswith("chose none")
    first = "the choice of auto, what it compared, and the rest" if fits else "none fits in the limit; by memory"
    title = f"{first}; bytes, launches and memory are the largest of a rank"
    rows = table(*columns, left=("strategy",), title=title)
    for last, one in pairwise([None, *facts["strategies"]]):
        if fits and last is not None and last["compared"] and not one["compared"]:
            rows.add_section()
        forward, backward = (one["passes"][name] for name in PASSES)
        rows.add_row(
            Text(one["label"]),
            bytes_text(forward["sent_bytes"]),
            bytes_text(backward["sent_bytes"]),
            f"{forward['launches']} + {backward['launches']}",
            f"{forward['imbalance']:.3f}",
            bytes_text(_peak(one)),
            *(seconds_text(seconds) for seconds in (forward["seconds"], backward["seconds"], one["seconds"])),
        )
    console.print(rows, "")
    titles = Table.grid(padding=(0, 1, 0, 0))
    for name, title in {one["strategy"]: one["title"] for one in facts["strategies"]}.items():
        titles.add_row(Text(name), Text(title))
    console.print(titles, "")
    console.print(labelled("auto", choice_text(facts)))
    names: dict[str, list[str]] = {}
    for name, condition in facts["not_compared"].items():
        names.setdefault(condition, []).append(name)
    for condition, alike in names.items():
        console.print(labelled("", f"compares {', '.join(alike)} {condition}"))
    for label, reason in facts["unsupported"].items():
        console.print(labelled("not", f"{label}: {reason}"))
    for note in facts["notes"]:
        console.print(labelled("note", note))


def choice_text(facts: Facts) -> str:
    """Return what `auto` chose and by what, without the times, which the table has."""
    parts = (part for part in facts["chosen"].split("; ") if not part.startswith("not "))
    chosen = [part.partition(" (")[0] for part in parts]
    return "; ".join(chosen[: 1 + chosen[0].startswith("layout ")])
