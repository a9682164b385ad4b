"""Define `burst-portable plan`, which prints the steps and costs of a plan without a device or torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from burst_portable.cli import flags
from burst_portable.cli.output import JsonName, JsonOption, check_picture, console, on_stderr, writing
from burst_portable.cli.plan_comparison import ALL, comparison_facts, show_comparison, unlimited
from burst_portable.cli.plan_facts import CHECKED_RANKS, Facts, checked_ranks, plan_facts, verification_facts
from burst_portable.cli.plan_hardware import DEFAULT_BANDWIDTH, DEFAULT_TFLOPS, HardwareOptions
from burst_portable.cli.strategy_flags import flag, make_named_strategy, with_strategy_flags
from burst_portable.errors import InputError, MemoryLimitError, unknown_name
from burst_portable.planning.hardware import HardwareSpec
from burst_portable.planning.plans import Plan
from burst_portable.strategies.base import Strategy
from burst_portable.strategies.planner import plan as make_plan
from burst_portable.strategies.registry import has_option, known, named_if_broken, strategy_name
from burst_portable.utils.values import check_divides

ITEMSIZES = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}
WITH_DROPOUT = ("triton", "triton-tf32", "reference")
"""Kernels that support dropout. This command imports none of them."""
_PROGRESS_RANKS = 64  # up to this many ranks are verified too quickly for a progress bar
_MOST = 1_000_000  # ranks of a node, and printed steps


@with_strategy_flags
def plan(
    seq_len: flags.SeqLen,
    ranks: Annotated[int, flags.integer_option(help="Number of ranks.")],
    heads: flags.Heads = 32,
    kv_heads: flags.KvHeads = None,
    head_dim: Annotated[int, flags.integer_option(help="Elements per query and key head.")] = 128,
    v_head_dim: flags.VHeadDim = None,
    mask: Annotated[
        str,
        typer.Option(
            help="full, causal, window:LEFT:RIGHT, documents:0,END,END, full_documents:0,END,END, prefix:N, "
            "sink:N:LEFT, global:N:LEFT:RIGHT, block_causal:SIZE, share_question:Q,A,A, in tokens, or "
            "block_sparse:SIZE:PERCENT (docs/masks.md)."
        ),
    ] = "causal",
    strategy: Annotated[
        str, typer.Option(help=f"{flags.STRATEGY.rstrip('.')}, or {ALL}, which compares them.")
    ] = "auto",
    layout: flags.Layout = flags.DEFAULT_LAYOUT,
    ranks_per_node: flags.RanksPerNode = None,
    *,
    options: Mapping[str, object],
    batch: Annotated[int, flags.integer_option(help="Sequences per call.")] = 1,
    dtype: Annotated[str, typer.Option(help="float16, bfloat16, float32 or float64.")] = "bfloat16",
    dropout: flags.Dropout = 0.0,
    tflops: Annotated[
        float | None, typer.Option(help=f"TFLOP/s per rank, for predicted times. Default: {DEFAULT_TFLOPS:g}.")
    ] = None,
    intra_node_bandwidth: Annotated[
        float | None,
        typer.Option(help=f"GB/s between ranks of a node, per direction. Default: {DEFAULT_BANDWIDTH:g}."),
    ] = None,
    inter_node_bandwidth: Annotated[
        float | None,
        typer.Option(help="GB/s per rank between nodes; requires --ranks-per-node. Default: 50."),
    ] = None,
    hardware_file: Annotated[
        str | None,
        typer.Option(
            "--hardware-spec",
            metavar="FILE",
            help="Rates that `measure` wrote, or the name of a known machine, instead of these. Default: none.",
        ),
    ] = None,
    rank: Annotated[int, flags.integer_option(help="Rank whose steps are printed.")] = 0,
    show_steps: Annotated[int, flags.integer_option(help="Largest number of steps to print per pass.")] = 16,
    check: Annotated[
        bool,
        typer.Option("--check/--no-check", help=f"Verify the plan; above {CHECKED_RANKS} ranks, for a sample of them."),
    ] = True,
    check_all: Annotated[
        bool,
        typer.Option("--check-all", help="Verify the plan for every rank; takes minutes for 1,024 ranks."),
    ] = False,
    picture: Annotated[
        Path | None, typer.Option(help=f"Write an SVG picture of --strategy {ALL}. Default: none.")
    ] = None,
    json_name: JsonName = None,
) -> int:
    """Print the steps and the cost of a distributed attention, and verify the plan. Requires no device.

    Times are predicted from --tflops, --intra-node-bandwidth and --inter-node-bandwidth, or from the file of
    --hardware-spec, by a model without contention. docs/plans.md describes the output. Exit code 1 if the plan is
    wrong.

    Examples:

    burst-portable plan --seq-len 131072 --ranks 8
    burst-portable plan --seq-len 8192 --ranks 4 --mask documents:0,3000,8192 --json plan.json
    burst-portable plan --seq-len 131072 --ranks 8 --strategy all --picture plans.svg
    """
    json_option = JsonOption(json_name, sources=(hardware_file,))
    if check_all and not check:
        raise InputError("--check-all and --no-check exclude each other")
    rates = HardwareOptions(hardware_file, tflops, intra_node_bandwidth, inter_node_bandwidth, ranks_per_node)
    _check_counts(ranks_per_node=ranks_per_node, show_steps=show_steps)
    if dtype not in ITEMSIZES:
        raise unknown_name("dtype", dtype, ITEMSIZES)
    if ranks_per_node is not None and ranks > 0:
        check_divides(ranks_per_node, ranks)
    hardware = rates.hardware(ranks, dtype, head_dim)
    if picture is not None:
        if strategy != ALL:
            raise InputError(
                "only a comparison has a picture", got=f"--strategy {strategy}", allowed=f"--strategy {ALL}"
            )
        check_picture(picture, sources=(hardware_file,))
    planner = _planner(strategy, ranks_per_node, options, hardware)

    def make(planner: Strategy) -> Plan:
        made = make_plan(
            strategy=planner, seq_len=seq_len, ranks=ranks, heads=heads, kv_heads=kv_heads, head_dim=head_dim,
            v_head_dim=v_head_dim, mask=mask, layout=layout, batch=batch, itemsize=ITEMSIZES[dtype], dropout_p=dropout,
        )  # fmt: skip
        if not 0 <= rank < ranks:
            raise InputError("no such rank", got=rank, allowed=f"0 to {ranks - 1}")
        return made

    notes = [*rates.notes(hardware, ranks), *_dropout_notes(dropout), *rates.setting_notes()]
    if strategy == ALL:
        _compare(make, planner, hardware, notes, json_option, picture)
        return 0
    from burst_portable.cli.plan_view import show, show_check

    with _planning(planner):
        made = make(planner)
        facts = plan_facts(made, hardware, rank)
    facts["notes"] = notes
    out = console(quiet=json_option.stdout)
    with out, named_if_broken(planner):  # `out` writes at the end: an error of the output is not the strategy's
        facts["check"] = _check(made, check_all) if check else {"done": False}
        show(out, made, facts, steps=show_steps)
    json_option.write(facts)
    show_check(out, facts)
    return 0 if facts["check"].get("ok", True) else 1


def _planner(
    strategy: str, ranks_per_node: int | None, options: Mapping[str, object], hardware: HardwareSpec
) -> Strategy:
    """Return the strategy of the options; `auto` for a comparison, which takes no other option than its limit."""
    refused = {name: value for name, value in options.items() if name != "max_memory_mib"}
    if strategy == ALL and refused:
        got = ", ".join(f"{flag(name)} {value}" for name, value in refused.items())
        next_step = "name one strategy; --strategy all takes --max-memory-mib"
        raise InputError("--strategy all excludes options of a strategy", got=got, next_step=next_step)
    name = "auto" if strategy == ALL else strategy
    has_nodes = strategy_name(name) in known() and has_option(name, "ranks_per_node")
    return make_named_strategy(name, ranks_per_node if has_nodes else None, options, hardware)


@contextmanager
def _planning(planner: Strategy) -> Iterator[None]:
    """Show that plans are made, which takes seconds for a thousand ranks. Name a broken strategy in errors."""
    with named_if_broken(planner), console(stderr=True).status("planning"):
        yield


def _compare(
    make: Callable[[Strategy], Plan], planner: Strategy, hardware: HardwareSpec, notes: list[str],
    json_option: JsonOption, picture: Path | None,
) -> None:  # fmt: skip
    """Print and write the costs of all strategies. Raise `MemoryLimitError` after that if none fits in the limit."""
    too_large: MemoryLimitError | None = None
    with _planning(planner):
        try:
            made = make(planner)
        except MemoryLimitError as error:
            too_large, made = error, make(unlimited(planner))
        facts = comparison_facts(made, planner, hardware, too_large)
    facts["notes"] = notes
    show_comparison(console(quiet=json_option.stdout), facts)
    json_option.write(facts)
    if picture is not None:
        from burst_portable.cli.plan_chart import draw_comparison

        with writing(picture):
            picture.write_text(draw_comparison(facts), encoding="utf-8")
    if too_large is not None:
        raise too_large


def _dropout_notes(dropout: float) -> list[str]:
    """Return a note for calls with dropout."""
    if not dropout:
        return []
    return [f"only the kernels {', '.join(WITH_DROPOUT)} have dropout; the predicted times do not include it"]


def _check_counts(**numbers: int | None) -> None:
    for name, number in numbers.items():
        if number is not None and not 1 <= number <= _MOST:
            raise InputError(f"{flag(name)} is out of range", got=number, allowed=f"an int from 1 to {_MOST:,}")


def _check(plan: Plan, check_all: bool) -> Facts:
    ranks = checked_ranks(plan.call.ranks, check_all, plan.head_parallel_size, plan.head_spacing)
    if plan.call.ranks <= _PROGRESS_RANKS:
        return verification_facts(plan, ranks, lambda done: None)
    from rich.progress import Progress

    with Progress(**on_stderr()) as progress:
        task = progress.add_task("verifying", total=2 * len(ranks))
        return verification_facts(plan, ranks, lambda done: progress.update(task, completed=done))
