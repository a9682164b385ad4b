"""Define `burst-portable conform`, which tests a backend, a kernel or a strategy on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from burst_portable.cli.flags import integer_option
from burst_portable.cli.output import JsonName, JsonOption, check_files, writing
from burst_portable.errors import InputError

RANKS = 8


def conform(
    backend: Annotated[
        str | None,
        typer.Option(help="Backend to test. Default: that of this machine's accelerator, or else of its CPU."),
    ] = None,
    ranks: Annotated[
        int, integer_option(help="Largest number of ranks of a test case (threads, and a few processes).")
    ] = RANKS,
    only: Annotated[
        list[str] | None, typer.Option(help="Test groups, separated by commas; --list names them. Default: all.")
    ] = None,
    case: Annotated[
        list[str] | None,
        typer.Option(help="A test named as in reports: attention:mask=full,ranks=3. Default: all."),
    ] = None,
    kernel: Annotated[str, typer.Option(help="Kernel to test, or auto for all of the backend.")] = "auto",
    strategy: Annotated[
        str | None, typer.Option(help="Strategy to test, also of another package. Default: all of the backend.")
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Run a few cases: seconds on a CPU, minutes on a GPU.")
    ] = False,
    processes: Annotated[
        int, integer_option(min=1, max=256, help="Processes that run test cases on the same devices, 1 to 256.")
    ] = 1,
    full: Annotated[
        bool,
        typer.Option("--full", help="Run all combinations of masks, layouts, strategies, ranks and heads: an hour."),
    ] = False,
    evidence_level: Annotated[
        str | None,
        typer.Option(help="reference, interpreter, machine code, simulated or device. Default: the probe's."),
    ] = None,
    json_name: JsonName = None,
    junit_file: Annotated[
        Path | None, typer.Option("--junit", help="Write the report as JUnit XML to this file. Default: none.")
    ] = None,
    markdown_file: Annotated[
        Path | None, typer.Option("--markdown", help="Write the report as Markdown to this file. Default: none.")
    ] = None,
    list_groups: Annotated[bool, typer.Option("--list", help="List the test groups and exit.")] = False,
) -> int:
    """Test a backend, a kernel or a strategy against attention in float64.

    Without --quick or --full, the cases contain every pair of choices (mask, layout, strategy, ranks, heads). Each
    failure is printed with the smallest case that fails and the command that repeats it. On a GPU most time is spent
    compiling kernels: use as many --processes as there are cores. Exit code 1 if a check fails. See
    docs/conformance.md.

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
        raise InputError("--strategy and --case exclude each other", next_step="a case includes its strategy")
    if only and case:
        raise InputError("--only and --case exclude each other", next_step="a case includes its group")
    check_files({"--json": json_option.file, "--junit": junit_file, "--markdown": markdown_file})

    from burst_portable.conformance.suite import check_backend

    coverage = "quick" if quick else "full" if full else "usual"
    groups = [name.strip() for text in only or () for name in text.split(",")]
    with progress() as on_progress:
        report = check_backend(
            _backend_of_this_machine() if backend is None else backend,
            ranks=ranks,
            only=groups,
            cases=case or (),
            coverage=coverage,
            kernel=kernel,
            strategy=strategy or "",
            evidence_level=evidence_level,
            processes=processes,
            progress=on_progress,
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


def _backend_of_this_machine() -> str:
    import torch

    from burst_portable.backends.selection import for_device

    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return for_device(accelerator.type if accelerator else torch.empty(0).device.type).name
