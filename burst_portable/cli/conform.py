"""`burst-portable conform`: whether a backend may be trusted, tried on the machine that it is run on."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from burst_portable.cli.output import JSON_HELP, JsonOption, check_files, writing
from burst_portable.errors import InputError

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
        list[str] | None, typer.Option(help="One test, as a report names it: attention:mask=full,ranks=3")
    ] = None,
    kernel: Annotated[str, typer.Option(help="The one kernel to examine, instead of all.")] = "auto",
    strategy: Annotated[
        str, typer.Option(help="The one strategy to try, ours or another package's, instead of a whole backend.")
    ] = "",
    quick: Annotated[
        bool,
        typer.Option(
            "--quick",
            help="A handful of cases: seconds on a CPU; on a GPU every kernel is compiled first: minutes.",
        ),
    ] = False,
    processes: Annotated[
        int,
        typer.Option(
            min=1,
            max=256,
            help="How many make trials side by side, on the same devices. On a GPU, where every kernel is compiled "
            "first, as many as there are cores.",
        ),
    ] = 1,
    full: Annotated[
        bool, typer.Option("--full", help="Every combination of masks, layouts, strategies, ranks and heads: an hour.")
    ] = False,
    evidence_level: Annotated[
        str | None,
        typer.Option(
            help="Kind of evidence: reference, interpreter, machine code, simulated or device. Default: the probe's."
        ),
    ] = None,
    json_name: Annotated[str | None, typer.Option("--json", metavar="[FILE]", help=JSON_HELP)] = None,
    junit_file: Annotated[
        Path | None, typer.Option("--junit", help="Write the report as JUnit XML to this file.")
    ] = None,
    markdown_file: Annotated[Path | None, typer.Option("--markdown", help="Write it as Markdown to this file.")] = None,
    list_groups: Annotated[bool, typer.Option("--list", help="List the groups of checks and stop.")] = False,
) -> int:
    """Try everything that a backend must fulfil, against attention in float64.

    Unless --quick or --full is given, every pair of choices occurs. Every failure is told with the smallest case that
    still fails and a command that runs exactly it. Exit code 1 when something fails. See docs/conformance.md.

    Examples:

    burst-portable conform --backend cpu --quick
    burst-portable conform --backend cuda --processes 16 --json report.json --junit report.xml
    """
    from burst_portable.cli.conform_view import progress, show, show_groups

    json_option = JsonOption(json_name)
    if list_groups:
        show_groups(json_option)
        return 0
    if quick and full:
        raise InputError("--quick and --full exclude each other")
    if strategy and case:
        raise InputError("--strategy and --case exclude each other", next_step="a case names its strategy itself")
    if only and case:
        raise InputError("--only and --case exclude each other", next_step="a case names its group itself")
    check_files({"--json": json_option.file, "--junit": junit_file, "--markdown": markdown_file})

    from burst_portable.conformance.suite import check_backend

    named = _of_this_machine() if backend is None else backend
    coverage = "quick" if quick else "full" if full else "usual"
    groups = [name.strip() for text in only or () for name in text.split(",")]
    with progress() as told:
        report = check_backend(
            named,
            ranks=ranks,
            only=groups,
            cases=case or (),
            coverage=coverage,
            kernel=kernel,
            strategy=strategy,
            evidence_level=evidence_level,
            processes=processes,
            progress=told,
        )
    show(report, stderr=json_option.stdout)
    json_option.write_text(report.to_json())
    if junit_file is not None:
        with writing(junit_file):
            junit_file.write_text(report.junit(), encoding="utf-8")
    if markdown_file is not None:
        with writing(markdown_file):
            markdown_file.write_text(report.markdown(), encoding="utf-8", errors="replace")
    return 0 if report.ok else 1


def _of_this_machine() -> str:
    import torch

    from burst_portable.backends.selection import for_device

    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return for_device(accelerator.type if accelerator else torch.empty(0).device.type).name
