"""Define `burst-portable profile`, `compare` and `trace`, which summarize files of profilers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from burst_portable.cli.output import JsonName, JsonOption, check_files, console, table, writing
from burst_portable.errors import InputError
from burst_portable.utils.files import write_text

COMPARE_SCHEMA = "burst_portable.compare/2"
TRACE_SCHEMA = "burst_portable.trace/2"
_SUMMARY = ("schema", "summary", "bottlenecks", "ranks", "ablation")
"""Keys of a report that `profile --json` prints."""


def profile(
    report: Annotated[Path, typer.Argument(help="Report: profile.json of `run --profile`, or of Report.write_json.")],
    html: Annotated[
        Path | None, typer.Option(help="Write one self-contained HTML page to this file. Default: none.")
    ] = None,
    chrome: Annotated[
        Path | None, typer.Option(help="Write a trace for ui.perfetto.dev to this file. Default: none.")
    ] = None,
    markdown: Annotated[
        Path | None, typer.Option(help="Write Markdown to this file; with -, print only Markdown. Default: none.")
    ] = None,
    json_name: JsonName = None,
) -> None:
    """Show where the time of a profiled run went: the largest loss, ranks, steps.

    The options write the report in other formats.

    Examples:

    burst-portable run --ranks 2 --profile --report report
    burst-portable profile report/profile.json --html page.html
    """
    from burst_portable.profiling.report import Report

    json_option = JsonOption(json_name, sources=(report,))
    to_stdout = str(markdown) == "-"
    if to_stdout and json_option.stdout:
        raise InputError("--json and --markdown - both use standard output", next_step="write one of them to a file")
    outputs = {"--html": html, "--chrome": chrome, "--markdown": None if to_stdout else markdown}
    check_files({**outputs, "--json": json_option.file}, sources=(report,))
    read = Report.load(report)
    writers: tuple[Callable[[Path], None], ...] = (
        read.write_html,
        read.write_chrome,
        lambda file: write_text(file, read.markdown()),
    )
    for file, write in zip(outputs.values(), writers, strict=True):
        if file is not None:
            with writing(file):
                write(file)
    json_option.write({name: read.data[name] for name in _SUMMARY if name in read.data})
    if to_stdout:
        typer.echo(read.markdown(), nl=False)
    elif not json_option.stdout:
        read.print(console())


def compare(
    before: Annotated[Path, typer.Argument(help="Report of the earlier run.")],
    after: Annotated[Path, typer.Argument(help="Report of the later run.")],
    threshold: Annotated[float, typer.Option(help="Allowed relative slowdown of a part: 0.1 is 10 %.")] = 0.1,
    json_name: JsonName = None,
) -> int:
    """Compare two reports of `run --profile`, and list the parts of a training step that became slower.

    Times are those of the slowest rank. Both reports must have the same attention FLOPs per step. Other differences
    (strategy, layout, level, device, backend, kernel) are printed. Exit code 1 if a part, or the median of marked
    steps, became slower by more than the threshold.

    Examples:

    burst-portable compare before/profile.json after/profile.json --threshold 0.2
    """
    from rich.markup import escape

    from burst_portable.profiling.report import Report
    from burst_portable.profiling.report.compare import CAUTIONS, differences
    from burst_portable.profiling.report.compare import compare as changes_of
    from burst_portable.profiling.report.tables import NAMES
    from burst_portable.utils.text import time_text

    json_option = JsonOption(json_name, sources=(before, after))
    old, new = Report.load(before).data, Report.load(after).data
    changes, other = changes_of(old, new, threshold), differences(old, new)
    worse = [NAMES.get(c.name, c.name) for c in changes if c.worse]
    json_option.write(
        {
            "schema": COMPARE_SCHEMA,
            "threshold": threshold,
            "ok": not worse,
            "parts": [{"name": c.name, "before_ns": c.before, "after_ns": c.after, "worse": c.worse} for c in changes],
            "differences": [d._asdict() for d in other],
        }
    )
    say = console(quiet=json_option.stdout)
    result = f"[bold red]SLOWER[/]  {', '.join(worse)}:" if worse else "[bold green]OK[/]  no part became slower"
    say.print(f"{result} by more than {100 * threshold:g} %")
    for d in other:
        caution = f": {CAUTIONS[d.name]}" if d.name in CAUTIONS else ""
        label = "[yellow]warning[/]" if caution else "differs"
        say.print(f"{label}  {d.name}: {escape(d.before)} before, {escape(d.after)} after{caution}")
    rows = table("per training step, slowest rank", "before", "after", "after / before")
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
    json_name: JsonName = None,
) -> None:
    """Show where the time of traced devices went, and how much communication overlapped with computation.

    Examples:

    burst-portable trace rank0.json rank1.json.gz
    """
    from rich.markup import escape

    from burst_portable.profiling.intervals import FIELDS
    from burst_portable.profiling.report.tables import NAMES
    from burst_portable.profiling.trace_files import read_trace
    from burst_portable.utils.text import percent, time_text

    json_option = JsonOption(json_name, sources=files)
    _check_no_trace(json_option.file)
    found = [read_trace(file) for file in files]
    traces = [{"file": str(file), **one} for file, one in zip(files, found, strict=True)]
    json_option.write({"schema": TRACE_SCHEMA, "traces": traces})
    named = zip(files, found, strict=True)
    rows = table("", *(escape(file.name) if one["rank"] is None else f"rank {one['rank']}" for file, one in named))
    for name in FIELDS:
        rows.add_row(NAMES.get(name, name), *(time_text(one[f"{name}_ns"]) for one in found))
    hidden = (percent(one["overlap_ns"] / one["comm_ns"]) if one["comm_ns"] else "-" for one in found)
    rows.add_row("communication overlapped", *hidden)
    console(quiet=json_option.stdout).print(rows)


def _check_no_trace(file: Path | None) -> None:
    """Raise `InputError` if `--json` would replace a trace, as in `trace --json rank0.json rank1.json`."""
    if file is None or not file.is_file():
        return
    with file.open("rb") as opened:
        start = opened.read(200)
    if start and TRACE_SCHEMA.partition("/")[0].encode() not in start:
        raise InputError(
            "--json names an existing file of other content",
            got=str(file),
            next_step="write the traces before --json, or remove the file",
        )
