"""`burst-portable plan`: what a distributed attention would do and cost. Needs neither device nor torch."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.console import Console

from burst_portable.cli.plan_facts import Facts, check, plan_facts, walks
from burst_portable.cost import Rates
from burst_portable.errors import InputError, explain, unknown_name
from burst_portable.planning import plan as make_plan
from burst_portable.plans import Plan
from burst_portable.strategies.base import Strategy
from burst_portable.strategies.registry import make_strategy

DTYPES = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}
_PROGRESS_ABOVE = 64  # ranks; fewer are checked before a bar could be read


def plan(
    seq_len: Annotated[int, typer.Option(help="Tokens of the whole sequence.")],
    ranks: Annotated[int, typer.Option(help="How many ranks share it.")],
    heads: Annotated[int, typer.Option(help="Query heads.")] = 32,
    kv_heads: Annotated[int | None, typer.Option(help="K/V heads; as many as query heads unless given.")] = None,
    head_dim: Annotated[int, typer.Option(help="Size of a query and key head.")] = 128,
    value_dim: Annotated[int | None, typer.Option(help="Size of a value head; --head-dim unless given.")] = None,
    mask: Annotated[
        str,
        typer.Option(
            help="full, causal, window:LEFT:RIGHT, documents:0,END,END, full_documents:0,END, prefix:N, sink:N:LEFT, "
            "global:N:LEFT:RIGHT, block_causal:SIZE or share_question:Q,A,A"
        ),
    ] = "causal",
    strategy: Annotated[str, typer.Option(help="auto, ring, burst, double_ring or ulysses.")] = "auto",
    layout: Annotated[str, typer.Option(help="contiguous, zigzag, striped or document_zigzag.")] = "zigzag",
    inner: Annotated[int | None, typer.Option(help="Ranks a node, for double_ring and auto.")] = None,
    travels: Annotated[
        str | None, typer.Option(help="kv or q: what double_ring sends round in the backward pass.")
    ] = None,
    moves: Annotated[str | None, typer.Option(help="neighbour or fetch: how blocks of ring and burst travel.")] = None,
    batch: Annotated[int, typer.Option(help="Sequences at once.")] = 1,
    dtype: Annotated[str, typer.Option(help="float16, bfloat16, float32 or float64.")] = "bfloat16",
    tflops: Annotated[float, typer.Option(help="TFLOP/s that a rank reaches: times are predicted with it.")] = 400.0,
    gbps: Annotated[float, typer.Option(help="GB/s between ranks, each way: times are predicted with it.")] = 100.0,
    rank: Annotated[int, typer.Option(help="Whose steps to show.")] = 0,
    steps: Annotated[int, typer.Option(help="How many steps of a pass to show.")] = 16,
    checked: Annotated[
        bool, typer.Option("--check/--no-check", help="Check that every pair is computed exactly once.")
    ] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Write JSON, to standard output or to FILE.")] = False,
    file: Annotated[Path | None, typer.Argument(help="With --json: the file to write.", show_default=False)] = None,
) -> int:
    """What a distributed attention would do and cost, step by step, and whether that is right. Needs no device.

    Times are predicted from --tflops and --gbps by a model that knows no contention. The fields of the JSON are
    listed in docs/plans.md. Exit code 1 when the check finds something wrong.
    """
    if file is not None and not as_json:
        raise InputError(explain("a FILE goes with --json", got=str(file)))
    _positive(tflops=tflops, gbps=gbps, inner=inner, steps=steps)
    if dtype not in DTYPES:
        raise unknown_name("dtype", dtype, DTYPES)
    rates = Rates(tflops=tflops, gbps=gbps)
    with _waiting("planning"):
        made = make_plan(
            seq_len=seq_len,
            ranks=ranks,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            value_dim=value_dim,
            mask=mask,
            strategy=_strategy(strategy, inner, travels, moves, rates),
            layout=layout,
            batch=batch,
            itemsize=DTYPES[dtype],
        )
        if not 0 <= rank < ranks:
            raise InputError(explain("no such rank", got=rank, allowed=f"0 to {ranks - 1}"))
        facts = plan_facts(made, rates, rank)
    if not as_json or file is not None:
        _show(made, facts, steps)
    facts["check"] = _check(made) if checked else {"done": False}
    if as_json:
        _write(facts, file)
    if not as_json or file is not None:
        _show_check(facts)
    return 0 if facts["check"].get("ok", True) else 1


def _positive(**numbers: float | None) -> None:
    for name, number in numbers.items():
        # Written so that nan is refused as well.
        if number is not None and not 0 < number < float("inf"):
            raise InputError(explain(f"--{name} is out of range", got=number, allowed="above 0"))


def _strategy(name: str, inner: int | None, travels: str | None, moves: str | None, rates: Rates) -> Strategy:
    given = {"inner": inner, "travels": travels, "moves": moves}
    return make_strategy(name, **given, rates=rates if name == "auto" else None)


def _waiting(label: str) -> AbstractContextManager[object]:
    """A sign of life on a terminal: a thousand ranks take seconds."""
    from rich.console import Console

    return Console(stderr=True).status(label)


def _check(plan: Plan) -> Facts:
    if plan.problem.ranks <= _PROGRESS_ABOVE:
        return check(plan, lambda done: None)
    with _bar("checking every pair", walks(plan)) as progress:
        return check(plan, progress)


@contextmanager
def _bar(label: str, total: int) -> Iterator[Callable[[int], None]]:
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(label, total=total)
        yield lambda done: progress.update(task, completed=done)


def _show(plan: Plan, facts: Facts, steps: int) -> None:
    from burst_portable.cli.plan_view import show

    show(_console(), plan, facts, steps=steps)


def _show_check(facts: Facts) -> None:
    from burst_portable.cli.plan_view import show_check

    show_check(_console(), facts)


def _console() -> Console:
    from rich.console import Console

    # Tables in a pipe or a log would be squeezed into 80 columns.
    return Console(highlight=False, width=None if sys.stdout.isatty() else 120)


def _write(facts: Facts, file: Path | None) -> None:
    text = json.dumps(facts, indent=2)
    if file is None:
        print(text)
        return
    try:
        file.write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise InputError(explain("the JSON cannot be written", got=error)) from error
