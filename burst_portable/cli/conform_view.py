"""What `burst-portable conform` shows: a bar while it works, then a table and every failure."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from burst_portable.conformance.report import TIERS, Report, closest
from burst_portable.conformance.suite import Progress as Told
from burst_portable.conformance.trial import Outcome, Trial

_SHOWN = 12  # failures; the files have all


@contextmanager
def bar() -> Iterator[Told]:
    """A progress bar on stderr, gone when the work is done."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("starting", total=None)
        failed = 0

        def told(done: int, total: int, trial: Trial, outcome: Outcome | None) -> None:
            nonlocal failed
            failed += outcome is not None and not outcome.ok
            what = f"{trial.check}, {failed} failed" if failed else trial.check
            progress.update(task, completed=done, total=total, description=what)

        yield told


def show(report: Report) -> None:
    """The table, what failed, the verdict."""
    console = _console()
    table = Table(title=f"{report.backend}, {report.effort}, up to {report.ranks} ranks")
    table.add_column("checks")
    for name in ("passed", "failed", "skipped"):
        table.add_column(name, justify="right")
    table.add_column("closest to the limit")
    table.add_column("seconds", justify="right")
    for line in report.lines():
        failed = f"[bold red]{line.failed}[/]" if line.failed else "0"
        row = (str(line.passed), failed, str(line.skipped), closest(line), f"{line.seconds:.1f}")
        table.add_row(line.check, *row)
    console.print(table)
    _show_failures(console, report)
    _show_skipped(console, report)
    counts = ", ".join(f"{count} {name}" for name, count in report.counts().items())
    verdict = "[bold green]conforms[/]" if report.ok else "[bold red]does not conform[/]"
    console.print(f"{report.backend} {verdict}: {counts}, in {report.seconds:.0f} s", soft_wrap=True)
    console.print(f"evidence: {report.tier} ({TIERS[report.tier]})", soft_wrap=True)


def _show_failures(console: Console, report: Report) -> None:
    for result in report.failures[:_SHOWN]:
        console.print(f"\n[bold red]failed[/] {escape(result.check)}:{escape(result.name)}", soft_wrap=True)
        console.print(f"  {escape(result.message)}", soft_wrap=True)
        if result.smallest != f"{result.check}:{result.name}":
            console.print(f"  smallest: {escape(result.smallest)}", soft_wrap=True)
        console.print(f"  again:    {escape(result.command)}", soft_wrap=True)
    if len(report.failures) > _SHOWN:
        console.print(f"\nand {len(report.failures) - _SHOWN} more: --json, --junit or --markdown hold them all")


def _show_skipped(console: Console, report: Report) -> None:
    for reason in dict.fromkeys(result.skipped for result in report.skipped):
        count = sum(result.skipped == reason for result in report.skipped)
        console.print(f"skipped {count}: {escape(reason)}", soft_wrap=True)


def show_groups() -> None:
    """The groups by name, and what they try."""
    from burst_portable.conformance.checks import CHECKS

    table = Table()
    table.add_column("--only")
    table.add_column("what is tried")
    for check in CHECKS.values():
        table.add_row(check.name, check.title)
    _console().print(table)


def _console() -> Console:
    # Tables in a pipe or a log would be squeezed into 80 columns.
    return Console(highlight=False, width=None if sys.stdout.isatty() else 120)
