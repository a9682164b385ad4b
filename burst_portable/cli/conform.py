"""`burst-portable conform`: whether a backend may be trusted, tried on the machine that it is run on."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from burst_portable.errors import InputError, explain

if TYPE_CHECKING:
    from burst_portable.conformance.report import Report

RANKS = 8


def conform(
    backend: Annotated[
        str | None, typer.Option(help="Which one; unless given, that of this machine's accelerator, or of its CPU.")
    ] = None,
    ranks: Annotated[
        int, typer.Option(help="The most ranks of a case; they are threads, and a few processes.")
    ] = RANKS,
    only: Annotated[
        list[str] | None, typer.Option(help="A group of checks, or several with commas; --list names them.")
    ] = None,
    case: Annotated[
        list[str] | None, typer.Option(help="One trial, as a report names it: attention:mask=full,ranks=3")
    ] = None,
    kernel: Annotated[str, typer.Option(help="The one kernel to examine, instead of all.")] = "auto",
    quick: Annotated[bool, typer.Option("--quick", help="A handful of cases: seconds.")] = False,
    full: Annotated[
        bool, typer.Option("--full", help="Every combination of masks, layouts, strategies, ranks and heads: an hour.")
    ] = False,
    tier: Annotated[
        str | None,
        typer.Option(help="What kind of evidence: reference, interpreter, machine code, stand-in or device."),
    ] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the report as JSON.")] = None,
    junit_file: Annotated[Path | None, typer.Option("--junit", help="Write it as JUnit XML.")] = None,
    markdown_file: Annotated[Path | None, typer.Option("--markdown", help="Write it as Markdown.")] = None,
    listed: Annotated[bool, typer.Option("--list", help="List the groups of checks and stop.")] = False,
) -> int:
    """Try everything that a backend must fulfil, against attention in float64.

    Unless --quick or --full is given, every pair of choices occurs. Every failure is told with the smallest case that
    still fails and a command that runs exactly it. Exit code 1 when something fails. See docs/conformance.md.
    """
    from burst_portable.cli.conform_view import bar, show, show_groups

    if listed:
        show_groups()
        return 0
    if quick and full:
        raise InputError("--quick and --full exclude each other")
    if only and case:
        raise InputError(explain("--only and --case exclude each other", next_step="a case names its group itself"))
    files = {json_file: "to_json", junit_file: "junit", markdown_file: "markdown"}
    for file in files:
        _check_file(file)

    from burst_portable.conformance.suite import check_backend

    named = _of_this_machine() if backend is None else backend
    effort = "quick" if quick else "full" if full else "usual"
    groups = [name.strip() for text in only or () for name in text.split(",")]
    with bar() as progress:
        report = check_backend(
            named,
            ranks=ranks,
            only=groups,
            cases=case or (),
            effort=effort,
            kernel=kernel,
            tier=tier,
            progress=progress,
        )
    show(report)
    for file, method in files.items():
        if file is not None:
            _write(file, report, method)
    return 0 if report.ok else 1


def _of_this_machine() -> str:
    import torch

    from burst_portable.backends.registry import for_device

    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return for_device(accelerator.type if accelerator else torch.empty(0).device.type).name


def _check_file(file: Path | None) -> None:
    """Before the work is done, not after."""
    if file is not None and (file.is_dir() or not file.parent.is_dir()):
        raise InputError(
            explain("a report cannot be written there", got=str(file), allowed="a file in a folder that is")
        )


def _write(file: Path, report: Report, method: str) -> None:
    try:
        file.write_text(getattr(report, method)(), encoding="utf-8")
    except OSError as error:
        raise InputError(explain("a report cannot be written", got=error)) from error
