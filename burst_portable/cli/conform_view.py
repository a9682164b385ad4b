"""Print the progress of `burst-portable conform`, then its table and every failure."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from burst_portable.cli.output import JsonOption, console, on_stderr, table
from burst_portable.conformance.base import TestCase
from burst_portable.conformance.checks import CHECKS
from burst_portable.conformance.report import EVIDENCE_LEVELS, Report, Result, computed_text
from burst_portable.conformance.suite import Progress as OnProgress

_INTERVAL = 30.0  # seconds between lines about the progress of one group, in a log
_MAX_FAILURES = 12  # printed during a run, and after it; files contain all


@contextmanager
def progress() -> Iterator[OnProgress]:
    """Yield a callback that prints progress to stderr: a bar on a terminal, or in a log a line per group.

    The first failures are printed at once, because no report follows if the command is interrupted, for example because
    a kernel hangs. It then prints the test, and the number of failures so far.
    """
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    current, summary, failed = "", "", 0
    with Progress(*columns, **on_stderr()) as bar:
        task, lines = bar.add_task("starting", total=None), _Lines(bar.console)

        def on_progress(done: int, total: int, test: TestCase, result: Result | None) -> None:
            nonlocal current, summary, failed
            current = test.text
            if result is not None and not result.ok:
                failed += 1
                if failed <= _MAX_FAILURES:
                    bar.console.print(f"failed {test.text}: {result.message}", markup=False, soft_wrap=True)
            if done:
                summary = f", after {done} of {total} checks, of which {failed or 'none'} failed"
            description = f"{test.check}, {failed} failed" if failed else test.check
            bar.update(task, completed=done, total=total, description=description)
            if bar.disable:
                lines(done, total, test, result)

        try:
            yield on_progress
        except Exception:
            raise
        except BaseException:
            if current:
                bar.console.print(f"interrupted while testing {current}{summary}", markup=False, soft_wrap=True)
            raise


class _Lines:
    """Print a line for each group of checks when it is done, and every 30 seconds during a group."""

    def __init__(self, stderr: Console) -> None:
        self._stderr, self._group = stderr, ""
        self._checks = self._failed = 0
        self._started = self._last = time.monotonic()

    def __call__(self, done: int, total: int, test: TestCase, result: Result | None) -> None:
        if result is None:
            if test.check != self._group:
                self._print_group()
                self._group, self._checks, self._failed, self._started = test.check, 0, 0, time.monotonic()
            return
        self._checks += 1
        self._failed += not result.ok
        if done == total:
            self._print_group()
        elif time.monotonic() - self._last >= _INTERVAL:
            self._last = time.monotonic()
            failed = f", {self._failed} of {self._group} failed" if self._failed else ""
            self._stderr.print(f"{self._group}: {done} of {total} checks are done{failed}", markup=False)

    def _print_group(self) -> None:
        if self._checks:
            count = f"{self._checks} check{'' if self._checks == 1 else 's'}"
            seconds = time.monotonic() - self._started
            failed = f", {self._failed} failed" if self._failed else ""
            self._stderr.print(f"{self._group}: {count} in {seconds:.1f} s{failed}", markup=False)


def show(report: Report, *, stderr: bool = False) -> None:
    """Print the table, the failures, the skipped checks and the result."""
    out = console(stderr=stderr)
    title = f"{escape(report.backend)}, {report.coverage}, up to {report.ranks} ranks"
    columns = ("checks", "passed", "failed", "skipped", "closest to the limit", "seconds")
    rows = table(*columns, left=["closest to the limit"], title=title)
    for line in report.lines():
        failed = f"[bold red]{line.failed}[/]" if line.failed else "0"
        row = (str(line.passed), failed, str(line.skipped), escape(line.closest), f"{line.seconds:.1f}")
        rows.add_row(line.check, *row)
    out.print(rows, "")
    _show_failures(out, report)
    for reason, count in Counter(result.skipped for result in report.skipped).items():
        out.print(f"skipped {count}: {escape(reason)}", soft_wrap=True)
    counts = ", ".join(f"{count} {name}" for name, count in report.counts().items())
    out.print(f"kernels: {escape(computed_text(report))}", soft_wrap=True)
    out.print(f"evidence: {escape(_evidence(report))}", soft_wrap=True)
    out.print(f"{escape(report.subject)} {_verdict(report)}: {counts}, in {report.seconds:.0f} s", soft_wrap=True)


def _evidence(report: Report) -> str:
    """Return the level of evidence, and what it means; for a device, on which kind of device the kernels ran."""
    meaning = EVIDENCE_LEVELS[report.evidence_level]
    if report.evidence_level == "device":
        meaning = f"kernels ran on the real device {report.device['type']!r}, as the backend or the caller states"
    return f"{report.evidence_level} ({meaning})"


def _verdict(report: Report) -> str:
    """Return the result as text. Only a run of all tests conforms; tests that it omitted are in parentheses."""
    if not report.ok:
        return "[bold red]does not conform[/]"
    ran = {result.check for result in report.results}
    left_out = [
        name for name, check in CHECKS.items() if name not in ran and (check.by_strategy or not report.strategy)
    ]
    selection = [one for one in report.selection if one != f"strategy {report.strategy}"]  # it is the subject
    if report.conforms or (report.strategy and not selection and not left_out):
        tested = report.strategy or any(result.check == "group" and not result.skipped for result in report.results)
        limits = ["quick"] if report.coverage == "quick" else []
        limits += ["one rank only"] if report.ranks == 1 else []
        limits += [] if tested else ["the backend's own transport was not tested"]
        return "[bold green]conforms[/]" + (f" ({', '.join(limits)})" if limits else "")
    passed = "[bold yellow]passed[/] the selected tests"
    if not report.selection:
        return f"{passed}, which do not examine every kernel"
    limits = [", ".join(selection), f"not {', '.join(left_out)}" if left_out else ""]
    return f"{passed} ({escape('; '.join(filter(None, limits)))})"


def _show_failures(out: Console, report: Report) -> None:
    same = Counter(_cause(result) for result in report.failures)
    first = {_cause(result): result for result in reversed(report.failures)}  # in reverse, so that the first one stays
    shown = [first[cause] for cause in same][:_MAX_FAILURES]
    for result in shown:
        out.print(f"\n[bold red]failed[/] {escape(result.check)}:{escape(result.name)}", soft_wrap=True)
        out.print(f"  {escape(result.message)}", soft_wrap=True)
        if result.smallest != f"{result.check}:{result.name}":
            out.print(f"  smallest: {escape(result.smallest)}", soft_wrap=True)
        out.print(f"  repeat:   {escape(result.command)}", soft_wrap=True)
        if (equal := same[_cause(result)] - 1) > 0:
            what = "smallest case" if _cause(result) == result.smallest else "message"
            out.print(f"  {equal} more failed, with the same {what}")
    if (more := len(report.failures) - sum(same[_cause(result)] for result in shown)) > 0:
        out.print(f"\nand {more} more; --json, --junit and --markdown write all")


def _cause(result: Result) -> str:
    """Return the text by which failures are grouped: the smallest case, or the message of a test without smaller ones.

    Numbers in a message belong to one test, so failures with errors of quantities are not grouped by it.
    """
    is_smallest = result.smallest == f"{result.check}:{result.name}"
    return f"{result.check}: {result.message}" if is_smallest and not result.errors else result.smallest


def show_groups(json_option: JsonOption) -> None:
    """Print the name and title of each test group."""
    json_option.write({check.name: check.title for check in CHECKS.values()})
    if json_option.stdout:
        return
    rows = table("--only", "tests", left=["tests"])
    for check in CHECKS.values():
        rows.add_row(check.name, check.title)
    console().print(rows)
