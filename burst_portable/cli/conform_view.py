"""What `burst-portable conform` shows: how far it is, then a table and every failure."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from burst_portable.cli.output import JsonOption, console, table
from burst_portable.conformance.base import Outcome, TestCase
from burst_portable.conformance.report import EVIDENCE_LEVELS, Report, closest
from burst_portable.conformance.suite import Progress as Told

_SILENT = 30.0  # seconds between lines of how far it is, in a log
_SHOWN = 12  # failures; files have all of them


@contextmanager
def progress() -> Iterator[Told]:
    """On stderr: on a terminal a bar, gone when the work is done; in a file or a log a line for each group, and now and
    then one of how far it is.

    Who ends the command hears what it was at, since a kernel or a rank may hang, and what had been found by then.
    """
    place = console(stderr=True)
    at, found, failed = "", "", 0
    with _shown(place) as shown:

        def told(done: int, total: int, test: TestCase, outcome: Outcome | None) -> None:
            nonlocal at, found, failed
            at = test.text
            failed += outcome is not None and not outcome.ok
            if done:
                found = f", after {done} of {total} checks, of which {failed or 'none'} failed"
            shown(done, total, test, outcome)

        try:
            yield told
        except Exception:
            raise
        except BaseException:
            if at:
                place.print(f"ended while trying {at}{found}", markup=False, soft_wrap=True)
            raise


@contextmanager
def _shown(place: Console) -> Iterator[Told]:
    if not place.is_terminal:
        yield _Lines(place)
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=place, transient=True) as shown:
        task = shown.add_task("starting", total=None)
        failed = 0

        def told(done: int, total: int, test: TestCase, outcome: Outcome | None) -> None:
            nonlocal failed
            failed += outcome is not None and not outcome.ok
            what = f"{test.check}, {failed} failed" if failed else test.check
            shown.update(task, completed=done, total=total, description=what)

        yield told


class _Lines:
    """Tells of each group of checks when it is done: how many, in how many seconds; and how far it is meanwhile."""

    def __init__(self, place: Console) -> None:
        self._place, self._group = place, ""
        self._checks = self._failed = 0
        self._began = self._last = time.monotonic()

    def __call__(self, done: int, total: int, test: TestCase, outcome: Outcome | None) -> None:
        if outcome is None:
            if test.check != self._group:
                self._tell()
                self._group, self._checks, self._failed, self._began = test.check, 0, 0, time.monotonic()
            return
        self._checks += 1
        self._failed += not outcome.ok
        if done == total:
            self._tell()
        elif time.monotonic() - self._last >= _SILENT:
            self._last = time.monotonic()
            failed = f", {self._failed} of {self._group} failed" if self._failed else ""
            self._place.print(f"{self._group}: {done} of {total} checks are done{failed}", markup=False)

    def _tell(self) -> None:
        if self._checks:
            many = f"{self._checks} check{'' if self._checks == 1 else 's'}"
            failed = f", {self._failed} failed" if self._failed else ""
            self._place.print(f"{self._group}: {many} in {time.monotonic() - self._began:.1f} s{failed}", markup=False)


def show(report: Report, *, stderr: bool = False) -> None:
    """The table, what failed, the verdict."""
    say = console(stderr=stderr)
    title = f"{escape(report.backend)}, {report.coverage}, up to {report.ranks} ranks"
    columns = ("checks", "passed", "failed", "skipped", "closest to the limit", "seconds")
    rows = table(*columns, left=["closest to the limit"], title=title)
    for line in report.lines():
        failed = f"[bold red]{line.failed}[/]" if line.failed else "0"
        row = (str(line.passed), failed, str(line.skipped), escape(closest(line)), f"{line.seconds:.1f}")
        rows.add_row(line.check, *row)
    say.print(rows, "")
    _show_failures(say, report)
    _show_skipped(say, report)
    counts = ", ".join(f"{count} {name}" for name, count in report.counts().items())
    verdict = "[bold green]conforms[/]" if report.ok else "[bold red]does not conform[/]"
    say.print(f"{escape(report.backend)} {verdict}: {counts}, in {report.seconds:.0f} s", soft_wrap=True)
    say.print(f"evidence: {report.evidence_level} ({EVIDENCE_LEVELS[report.evidence_level]})", soft_wrap=True)


def _show_failures(say: Console, report: Report) -> None:
    for result in report.failures[:_SHOWN]:
        say.print(f"\n[bold red]failed[/] {escape(result.check)}:{escape(result.name)}", soft_wrap=True)
        say.print(f"  {escape(result.message)}", soft_wrap=True)
        if result.smallest != f"{result.check}:{result.name}":
            say.print(f"  smallest: {escape(result.smallest)}", soft_wrap=True)
        say.print(f"  again:    {escape(result.command)}", soft_wrap=True)
    if len(report.failures) > _SHOWN:
        say.print(f"\nand {len(report.failures) - _SHOWN} more: --json, --junit or --markdown hold them all")


def _show_skipped(say: Console, report: Report) -> None:
    for reason in dict.fromkeys(result.skipped for result in report.skipped):
        count = sum(result.skipped == reason for result in report.skipped)
        say.print(f"skipped {count}: {escape(reason)}", soft_wrap=True)


def show_groups(json_option: JsonOption) -> None:
    """The groups by name, and what they try."""
    from burst_portable.conformance.checks import CHECKS

    json_option.write({check.name: check.title for check in CHECKS.values()})
    if json_option.stdout:
        return
    rows = table("--only", "what is tried", left=["what is tried"])
    for check in CHECKS.values():
        rows.add_row(check.name, check.title)
    console().print(rows)
