"""`burst-portable plan`: what a distributed attention would do and cost. Needs neither device nor torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Annotated

import typer

from burst_portable.cli.flags import (
    LAYOUT,
    LENGTH,
    METAVAR,
    RANKS_PER_NODE,
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
from burst_portable.planning.hardware import HardwareSpec, read_hardware_spec
from burst_portable.planning.plans import Plan
from burst_portable.strategies.planner import plan as make_plan
from burst_portable.strategies.registry import has_option, known
from burst_portable.utils.values import check_divides

DTYPES = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}
_RANKS_A_NODE = 8  # the most devices that a server usually has
_PROGRESS_ABOVE = 64  # ranks; fewer are checked too quickly for a progress bar
_LEAST, _MOST = 1e-6, 1e6  # TFLOP/s, GB/s and ranks


@with_strategy_flags
def plan(
    seq_len: Annotated[
        int, typer.Option(parser=tokens, metavar=METAVAR, help=f"Tokens of the whole sequence; {LENGTH}")
    ],
    ranks: Annotated[int, typer.Option(help="How many ranks share it.")],
    heads: Annotated[int, typer.Option(help="Query heads; a multiple of the K/V heads.")] = 32,
    kv_heads: Annotated[int | None, typer.Option(help="K/V heads; as many as query heads unless given.")] = None,
    head_dim: Annotated[int, typer.Option(help="Numbers in a query or key head.")] = 128,
    v_head_dim: Annotated[int | None, typer.Option(help="Numbers in a value head; --head-dim unless given.")] = None,
    mask: Annotated[
        str,
        typer.Option(
            help="full, causal, window:LEFT:RIGHT, documents:0,END,END, full_documents:0,END,END, prefix:N, "
            "sink:N:LEFT, global:N:LEFT:RIGHT, block_causal:SIZE or share_question:Q,A,A; in tokens, see docs/masks.md"
        ),
    ] = "causal",
    strategy: Annotated[str, typer.Option(help=f"{STRATEGY} {ALL} compares them, in a table.")] = "auto",
    layout: Annotated[str, typer.Option(help=LAYOUT)] = "zigzag",
    ranks_per_node: Annotated[
        int | None, typer.Option(help=f"{RANKS_PER_NODE} For any strategy, what leaves a node is priced.")
    ] = None,
    *,
    options: Mapping[str, object],
    batch: Annotated[int, typer.Option(help="Sequences at once.")] = 1,
    dtype: Annotated[str, typer.Option(help="float16, bfloat16, float32 or float64.")] = "bfloat16",
    tflops: Annotated[
        float | None, typer.Option(help="TFLOP/s that a rank reaches: times are predicted with it; 400 unless given.")
    ] = None,
    intra_node_bandwidth: Annotated[
        float | None, typer.Option(help="GB/s between ranks, each way: times are predicted with it; 100 unless given.")
    ] = None,
    inter_node_bandwidth: Annotated[
        float | None,
        typer.Option(help="GB/s per rank between nodes of --ranks-per-node ranks. Default: 50."),
    ] = None,
    hardware_file: Annotated[
        str | None,
        typer.Option(
            "--hardware-spec", metavar="FILE", help="What `measure` wrote on a machine: all rates, in place of these."
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
    """Show the steps and the cost of a distributed attention, and check that it is correct. Needs no device.

    Times are predicted from --tflops, --intra-node-bandwidth and --inter-node-bandwidth, or from the file of
    --hardware-spec, by a model without contention. docs/plans.md lists the fields of the JSON.

    Examples:

    burst-portable plan --seq-len 131072 --ranks 8
    burst-portable plan --seq-len 8192 --ranks 4 --mask documents:0,3000,8192 --json plan.json
    burst-portable plan --seq-len 131072 --ranks 8 --strategy all
    """
    json_option = JsonOption(json_name, sources=(hardware_file,))
    if check_all and not checked:
        raise InputError("--check-all and --no-check exclude each other")
    _positive(
        tflops=tflops,
        intra_node_bandwidth=intra_node_bandwidth,
        ranks_per_node=ranks_per_node,
        steps=steps,
        **{"inter-node-bandwidth": inter_node_bandwidth},
    )
    if dtype not in DTYPES:
        raise unknown_name("dtype", dtype, DTYPES)
    if ranks_per_node is not None and ranks > 0:
        check_divides(ranks_per_node, ranks)
    hardware = _hardware(hardware_file, tflops, intra_node_bandwidth, ranks, dtype, head_dim)
    if inter_node_bandwidth is not None and not (ranks_per_node or hardware.ranks_per_node):
        raise InputError(
            "--inter-node-bandwidth is between nodes, and there is one",
            next_step="name --ranks-per-node, the ranks per node",
        )
    hardware = hardware.with_nodes(ranks_per_node or 0, inter_node_bandwidth)
    everything = strategy == ALL
    if everything and options:
        got = ", ".join(f"{flag(name)} {value}" for name, value in options.items())
        raise InputError("--strategy all takes no options of a strategy", got=got, next_step="name one strategy")
    named = "auto" if everything else strategy
    planner = asked_strategy(named, ranks_per_node if _has_nodes(named) else None, options, hardware)
    with _waiting("planning"):
        made = make_plan(
            seq_len=seq_len,
            ranks=ranks,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            v_head_dim=v_head_dim,
            mask=mask,
            strategy=planner,
            layout=layout,
            batch=batch,
            itemsize=DTYPES[dtype],
        )
        if not 0 <= rank < ranks:
            raise InputError("no such rank", got=rank, allowed=f"0 to {ranks - 1}")
        facts = comparison_facts(made, planner, hardware) if everything else plan_facts(made, hardware, rank)
    guessed = hardware_file is None and intra_node_bandwidth is None
    facts["notes"] = [_one_link(ranks)] if guessed and not hardware.ranks_per_node and ranks > _RANKS_A_NODE else []
    if hardware_file is None and (file := from_environment().hardware_spec):
        facts["notes"].append(
            f"the rates of BURST_HARDWARE_SPEC are this machine's, and not read here: --hardware-spec {file} takes them"
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
    return strategy in known() and has_option(strategy, "ranks_per_node")


def _hardware(
    file: str | None, tflops: float | None, intra_node_bandwidth: float | None, ranks: int, dtype: str, head_dim: int
) -> HardwareSpec:
    """Return the hardware of a file, or of the numbers that were typed.

    --inter-node-bandwidth goes with both, because a file may hold no speed between nodes.
    """
    if file is None:
        return HardwareSpec(
            tflops=400.0 if tflops is None else tflops,
            intra_node_bandwidth=100.0 if intra_node_bandwidth is None else intra_node_bandwidth,
        )
    for name, number in (("--tflops", tflops), ("--intra-node-bandwidth", intra_node_bandwidth)):
        if number is not None:
            raise InputError(f"--hardware-spec and {name} exclude each other", got=f"{file} and {number:g}")
    return read_hardware_spec(file).hardware_for(ranks, dtype=dtype, head_dim=head_dim)


def _one_link(ranks: int) -> str:
    """That a guess knows no network between nodes, and how to name one."""
    ranks_per_node = (
        f"--ranks-per-node {_RANKS_A_NODE} tells nodes"
        if ranks % _RANKS_A_NODE == 0
        else "--ranks-per-node RANKS tells nodes"
    )
    return f"all links are taken for equally fast, and {ranks:,} ranks seldom share one node: {ranks_per_node} apart"


def _positive(**numbers: float | None) -> None:
    for name, number in numbers.items():
        # Outside of this range, predicted times are infinite or no numbers. The comparison is False for nan.
        if number is not None and not _LEAST <= number <= _MOST:
            flag = name.replace("_", "-")
            raise InputError(f"--{flag} is out of range", got=number, allowed=f"{_LEAST:g} to {_MOST:g}")


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
