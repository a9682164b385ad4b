"""`burst-portable plan`: what a distributed attention would do and cost. Needs neither device nor torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Annotated

import typer

from burst_portable.cli.flags import (
    INNER,
    LAYOUT,
    LENGTH,
    METAVAR,
    STRATEGY,
    asked_strategy,
    flag,
    tokens,
    with_strategy_flags,
)
from burst_portable.cli.output import JSON_HELP, JsonOption, console, on_stderr
from burst_portable.cli.plan_comparison import ALL, comparison_facts, show_comparison
from burst_portable.cli.plan_facts import CHECKED_RANKS, Facts, check, checked_ranks, plan_facts
from burst_portable.config import from_environment
from burst_portable.errors import InputError, unknown_name
from burst_portable.planning.plans import Plan
from burst_portable.planning.rates import Rates, read_rates
from burst_portable.strategies.planner import plan as make_plan
from burst_portable.strategies.registry import has_option, known
from burst_portable.utils.values import check_divides

DTYPES = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}
_RANKS_A_NODE = 8  # the most devices that a server usually has
_PROGRESS_ABOVE = 64  # ranks; fewer are checked too quickly for a progress bar


@with_strategy_flags
def plan(
    seq_len: Annotated[
        int, typer.Option(parser=tokens, metavar=METAVAR, help=f"Tokens of the whole sequence; {LENGTH}")
    ],
    ranks: Annotated[int, typer.Option(help="How many ranks share it.")],
    heads: Annotated[int, typer.Option(help="Query heads; a multiple of the K/V heads.")] = 32,
    kv_heads: Annotated[int | None, typer.Option(help="K/V heads; as many as query heads unless given.")] = None,
    head_dim: Annotated[int, typer.Option(help="Numbers in a query or key head.")] = 128,
    value_dim: Annotated[int | None, typer.Option(help="Numbers in a value head; --head-dim unless given.")] = None,
    mask: Annotated[
        str,
        typer.Option(
            help="full, causal, window:LEFT:RIGHT, documents:0,END,END, full_documents:0,END,END, prefix:N, "
            "sink:N:LEFT, global:N:LEFT:RIGHT, block_causal:SIZE or share_question:Q,A,A; in tokens, see docs/masks.md"
        ),
    ] = "causal",
    strategy: Annotated[str, typer.Option(help=f"{STRATEGY} {ALL} compares them, in a table.")] = "auto",
    layout: Annotated[str, typer.Option(help=LAYOUT)] = "zigzag",
    inner: Annotated[int | None, typer.Option(help=f"{INNER} For any strategy, what leaves a node is priced.")] = None,
    *,
    options: Mapping[str, object],
    batch: Annotated[int, typer.Option(help="Sequences at once.")] = 1,
    dtype: Annotated[str, typer.Option(help="float16, bfloat16, float32 or float64.")] = "bfloat16",
    tflops: Annotated[
        float | None, typer.Option(help="TFLOP/s that a rank reaches: times are predicted with it; 400 unless given.")
    ] = None,
    gbps: Annotated[
        float | None, typer.Option(help="GB/s between ranks, each way: times are predicted with it; 100 unless given.")
    ] = None,
    outer_gbps: Annotated[
        float | None,
        typer.Option(help="GB/s per rank between nodes of --inner ranks, beside --gbps inside; 50 unless given."),
    ] = None,
    rates_file: Annotated[
        str | None,
        typer.Option(
            "--rates", metavar="FILE", help="What `measure` wrote on a machine: all rates, in place of these."
        ),
    ] = None,
    rank: Annotated[int, typer.Option(help="Whose steps to show.")] = 0,
    steps: Annotated[int, typer.Option(help="How many steps of a pass to show.")] = 16,
    checked: Annotated[
        bool,
        typer.Option("--check/--no-check", help=f"Check the plan; above {CHECKED_RANKS} ranks, of a sample of them."),
    ] = True,
    check_all: Annotated[
        bool,
        typer.Option("--check-all", help="Check every rank, however many: ranks x ranks blocks, minutes for 1,024."),
    ] = False,
    json_name: Annotated[str | None, typer.Option("--json", metavar="[FILE]", help=JSON_HELP)] = None,
) -> int:
    """What a distributed attention would do and cost, step by step, and whether that is right. Needs no device.

    Times are predicted from --tflops, --gbps and, for nodes of --inner ranks, --outer-gbps, or from what was measured
    on the machine that is meant, by a model that knows no contention. The fields of the JSON are listed in
    docs/plans.md.

    Examples:

    burst-portable plan --seq-len 131072 --ranks 8
    burst-portable plan --seq-len 8192 --ranks 4 --mask documents:0,3000,8192 --json plan.json
    burst-portable plan --seq-len 131072 --ranks 8 --strategy all
    """
    json_option = JsonOption(json_name, sources=(rates_file,))
    if check_all and not checked:
        raise InputError("--check-all and --no-check exclude each other")
    _positive(tflops=tflops, gbps=gbps, inner=inner, steps=steps, **{"outer-gbps": outer_gbps})
    if dtype not in DTYPES:
        raise unknown_name("dtype", dtype, DTYPES)
    if inner is not None and ranks > 0:
        check_divides(inner, ranks)
    rates = _rates(rates_file, tflops, gbps, ranks, dtype, head_dim)
    if outer_gbps is not None and not (inner or rates.node):
        raise InputError(
            "--outer-gbps is between nodes, and there is one", next_step="name --inner, the ranks per node"
        )
    rates = rates.with_nodes(inner or 0, outer_gbps)
    everything = strategy == ALL
    if everything and options:
        got = ", ".join(f"{flag(name)} {value}" for name, value in options.items())
        raise InputError("--strategy all takes no options of a strategy", got=got, next_step="name one strategy")
    named = "auto" if everything else strategy
    planner = asked_strategy(named, inner if _has_nodes(named) else None, options, rates)
    with _waiting("planning"):
        made = make_plan(
            seq_len=seq_len,
            ranks=ranks,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            value_dim=value_dim,
            mask=mask,
            strategy=planner,
            layout=layout,
            batch=batch,
            itemsize=DTYPES[dtype],
        )
        if not 0 <= rank < ranks:
            raise InputError("no such rank", got=rank, allowed=f"0 to {ranks - 1}")
        facts = comparison_facts(made, planner, rates) if everything else plan_facts(made, rates, rank)
    guessed = rates_file is None and gbps is None
    facts["notes"] = [_one_link(ranks)] if guessed and not rates.node and ranks > _RANKS_A_NODE else []
    if rates_file is None and (file := from_environment().rates):
        facts["notes"].append(
            f"the rates of BURST_RATES are this machine's, and not read here: --rates {file} takes them"
        )
    if everything:
        if not json_option.stdout:
            show_comparison(console(), facts)
        json_option.write(facts)
        return 0
    from burst_portable.cli.plan_view import show, show_check

    if not json_option.stdout:
        show(console(), made, facts, steps=steps)
    facts["check"] = _check(made, check_all) if checked else {"done": False}
    json_option.write(facts)
    if not json_option.stdout:
        show_check(console(), facts)
    return 0 if facts["check"].get("ok", True) else 1


def _has_nodes(strategy: str) -> bool:
    return strategy in known() and has_option(strategy, "inner")


def _rates(file: str | None, tflops: float | None, gbps: float | None, ranks: int, dtype: str, head_dim: int) -> Rates:
    """Those of a file, or one number each. A file may not know what is between nodes: --outer-gbps goes with both."""
    if file is None:
        return Rates(tflops=400.0 if tflops is None else tflops, gbps=100.0 if gbps is None else gbps)
    for name, number in (("--tflops", tflops), ("--gbps", gbps)):
        if number is not None:
            raise InputError(f"--rates and {name} exclude each other", got=f"{file} and {number:g}")
    return read_rates(file).rates_for(ranks, dtype=dtype, head_dim=head_dim)


def _one_link(ranks: int) -> str:
    """That a guess knows no network between nodes, and how to name one."""
    inner = f"--inner {_RANKS_A_NODE} tells nodes" if ranks % _RANKS_A_NODE == 0 else "--inner RANKS tells nodes"
    return f"all links are taken for equally fast, and {ranks:,} ranks seldom share one node: {inner} apart"


def _positive(**numbers: float | None) -> None:
    for name, number in numbers.items():
        # Written so that nan is refused as well.
        if number is not None and not 0 < number < float("inf"):
            raise InputError(f"--{name} is out of range", got=number, allowed="above 0, and finite")


def _waiting(label: str) -> AbstractContextManager[object]:
    """A sign of life on a terminal: a thousand ranks take seconds."""
    return console(stderr=True).status(label)


def _check(plan: Plan, everyone: bool) -> Facts:
    ranks = checked_ranks(plan.call.ranks, everyone, plan.head_parallel_size)
    if plan.call.ranks <= _PROGRESS_ABOVE:
        return check(plan, ranks, lambda done: None)
    with _bar("checking every pair", 2 * len(ranks)) as progress:
        return check(plan, ranks, progress)


@contextmanager
def _bar(label: str, total: int) -> Iterator[Callable[[int], None]]:
    from rich.progress import Progress

    with Progress(**on_stderr()) as progress:
        task = progress.add_task(label, total=total)
        yield lambda done: progress.update(task, completed=done)
