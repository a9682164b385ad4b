"""`burst-portable profile`, `compare` and `trace`: read what profilers wrote, and say where the time went."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from burst_portable.cli.output import PRINT_JSON_HELP, JsonOption, check_files, console, table, writing
from burst_portable.errors import InputError
from burst_portable.utils.files import write_text

COMPARE_SCHEMA = "burst_portable.compare/1"


def profile(
    report: Annotated[Path, typer.Argument(help="A report: profile.json of `run --profile`, or Report.write_json's.")],
    html: Annotated[Path | None, typer.Option(help="Write one self-contained page to this file.")] = None,
    chrome: Annotated[Path | None, typer.Option(help="Write a trace for ui.perfetto.dev to this file.")] = None,
    markdown: Annotated[
        Path | None,
        typer.Option(
            help="Write Markdown for a pull request to this file; -: to standard output, and nothing else there."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help=PRINT_JSON_HELP)] = False,
) -> None:
    """Say where the time of a profiled run went: verdict, ranks, steps; other forms of the report with options.

    Examples:

    burst-portable run --ranks 2 --profile --report report
    burst-portable profile report/profile.json --html page.html
    """
    from burst_portable.profiling.report import Report

    to_stdout = str(markdown) == "-"
    if to_stdout and as_json:
        raise InputError("--json and --markdown - both want standard output", next_step="name a file for one")
    check_files({"--html": html, "--chrome": chrome, "--markdown": None if to_stdout else markdown}, sources=(report,))
    read = Report.load(report)
    if html is not None:
        with writing(html):
            read.write_html(html)
    if chrome is not None:
        with writing(chrome):
            read.write_chrome(chrome)
    if to_stdout:
        typer.echo(read.markdown(), nl=False)
        return
    if markdown is not None:
        with writing(markdown):
            write_text(markdown, read.markdown())
    if as_json:
        told = ("schema", "verdict", "losses", "ranks", "ablation")
        JsonOption("-").write({name: read.data[name] for name in told if name in read.data})
    else:
        read.print(console())


def compare(
    before: Annotated[Path, typer.Argument(help="The report to hold against.")],
    after: Annotated[Path, typer.Argument(help="The newer report.")],
    threshold: Annotated[float, typer.Option(help="How much slower a part may become: 0.1 is a tenth.")] = 0.1,
    as_json: Annotated[bool, typer.Option("--json", help=PRINT_JSON_HELP)] = False,
) -> int:
    """Compare two reports of `run --profile`: which part of a training step became slower.

    Exit code 1 where one did by more than the threshold, or the median step, where both reports have marked steps.
    Times are of the slowest rank. Reports of other work, by
    attention's FLOPs per step, are refused; what else differs (strategy, layout, level, device) is told.

    Examples:

    burst-portable compare before/profile.json after/profile.json --threshold 0.2
    """
    from rich.markup import escape

    from burst_portable.profiling.report import Report
    from burst_portable.profiling.report.compare import CAUTIONS, differences
    from burst_portable.profiling.report.compare import compare as changes_of
    from burst_portable.profiling.report.tables import NAMES
    from burst_portable.utils.text import time_text

    old, new = Report.load(before).data, Report.load(after).data
    changes, other = changes_of(old, new, threshold), differences(old, new)
    worse = [NAMES.get(c.name, c.name) for c in changes if c.worse]
    if as_json:
        parts = [{"name": c.name, "before_ns": c.before, "after_ns": c.after, "worse": c.worse} for c in changes]
        told = {"threshold": threshold, "ok": not worse, "parts": parts, "differs": [d._asdict() for d in other]}
        JsonOption("-").write({"schema": COMPARE_SCHEMA, **told})
        return 1 if worse else 0
    say = console()
    if worse:
        say.print(f"[bold red]SLOWER[/]  {', '.join(worse)}: by more than {100 * threshold:g} %")
    else:
        say.print(f"[bold green]OK[/]  nothing became slower by more than {100 * threshold:g} %")
    for d in other:
        caution = f": {CAUTIONS[d.name]}" if d.name in CAUTIONS else ""
        label = "[yellow]warning[/]" if caution else "differs"
        say.print(f"{label}  {d.name}: {escape(d.before)} before, {escape(d.after)} after{caution}")
    rows = table("a training step, slowest rank", "before", "after", "after / before")
    for c in changes:
        style = "red" if c.worse else ""
        ratio = f"{c.ratio:.2f}" if c.before else "-"
        rows.add_row(NAMES.get(c.name, c.name), time_text(c.before), time_text(c.after), ratio, style=style)
    say.print("", rows)
    return 1 if worse else 0


def trace(
    files: Annotated[
        list[Path], typer.Argument(help="Traces of torch.profiler or torch_npu.profiler, one per rank (JSON or .gz).")
    ],
    as_json: Annotated[bool, typer.Option("--json", help=PRINT_JSON_HELP)] = False,
) -> None:
    """Say where the time went in traces that a profiler wrote on a device, and how much communication it hid.

    Examples:

    burst-portable trace rank0.json rank1.json.gz
    """
    from rich.markup import escape

    from burst_portable.profiling.intervals import FIELDS
    from burst_portable.profiling.report.tables import NAMES
    from burst_portable.profiling.tracing import read_trace
    from burst_portable.utils.text import percent, time_text

    found = [read_trace(file) for file in files]
    if as_json:
        JsonOption("-").write([{"file": str(file), **one} for file, one in zip(files, found, strict=True)])
        return
    named = zip(files, found, strict=True)
    rows = table("", *(escape(file.name) if one["rank"] is None else f"rank {one['rank']}" for file, one in named))
    for name in FIELDS:
        rows.add_row(NAMES.get(name, name), *(time_text(one[name]) for one in found))
    hidden = (percent(one["overlap"] / one["comm"]) if one["comm"] else "-" for one in found)
    rows.add_row("communication hidden", *hidden)
    console().print(rows)
