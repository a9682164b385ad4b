"""Define `burst-portable bench`, which compares the strategies on this machine over sixteen masks."""

from __future__ import annotations

import platform
import shlex
import sys
from collections.abc import Collection, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.progress import Progress

from burst_portable import __version__
from burst_portable.bench.chart import draw
from burst_portable.bench.peer_names import PEERS, versions
from burst_portable.bench.results import (
    COLUMNS,
    SCHEMA,
    Row,
    append_rows,
    cells,
    check_appendable,
    markdown,
    read_rows,
    reasons,
    row_key,
)
from burst_portable.cli import PROGRAM, flags
from burst_portable.cli.backend_choice import choose_backend
from burst_portable.cli.bench_files import of_files
from burst_portable.cli.bench_options import (
    QUICK,
    check_sizes,
    checked_lengths,
    counts_text,
    entry_names,
    kernel_names,
    lengths_text,
    mask_names,
    numbers_of_ranks,
    sizes_with_defaults,
)
from burst_portable.cli.flags import add_rank_to_errors
from burst_portable.cli.output import (
    JsonName,
    JsonOption,
    check_files,
    check_picture,
    console,
    labelled,
    on_stderr,
    table,
    writing,
)
from burst_portable.cli.process import Ended
from burst_portable.config import LauncherEnv, read_launcher_env
from burst_portable.errors import InputError, unknown_name
from burst_portable.layout import NAMES
from burst_portable.strategies.planner import checked_probability

if TYPE_CHECKING:
    from rich.console import Console

    from burst_portable.backends.base import Backend
    from burst_portable.cli.bench_worker import BenchJob, Work

_DTYPES = ("float32", "bfloat16", "float16")
_PACKAGES = ("torch", "triton", "ring-flash-attn", "yunchang", "magi-attention", "flash-attn-4")
_WIDTH_OF_NUMBERS = 8  # so that headers wrap, and names of strategies do not


def bench(
    words: Annotated[
        list[str] | None,
        typer.Argument(metavar="[compare A B | draw A]", help="Compare or draw files. Default: measure."),
    ] = None,
    ranks: Annotated[
        str | None,
        typer.Option(
            parser=counts_text, metavar="N,...",
            help="Local processes, or several numbers with commas. Default: one per device; 2 on CPUs.",
        ),
    ] = None,
    backend: flags.BackendName = "auto",
    masks: Annotated[
        str | None, typer.Option(help="all, or names of masks, separated by commas. Default: all, or none with --mask.")
    ] = None,
    own_masks: Annotated[
        list[str] | None,
        typer.Option("--mask", help="Another mask as in `plan`, such as window:4096:0; repeatable. Default: none."),
    ] = None,
    strategies: Annotated[
        str, typer.Option(help=f"ours, all, or names, separated by commas; peers: {', '.join(PEERS)}.")
    ] = "all",
    kernels: Annotated[str, typer.Option(help="Names of local kernels, separated by commas.")] = "auto",
    dtype: Annotated[
        str | None, typer.Option(help=f"{', '.join(_DTYPES)}. Default: bfloat16; float32 on CPUs.")
    ] = None,
    heads: Annotated[int | None, flags.integer_option(help="Query heads. Default: 64; 4 on CPUs.")] = None,
    kv_heads: Annotated[
        int | None, flags.integer_option(help="K/V heads. Default: 8; 2 on CPUs; all if only --heads is given.")
    ] = None,
    head_dim: Annotated[int | None, flags.integer_option(help="Elements per head. Default: 128; 32 on CPUs.")] = None,
    layout: Annotated[
        str, typer.Option(help=f"{', '.join(NAMES)}; those of documents take documents, full, causal, or windows.")
    ] = "zigzag",
    dropout: flags.Dropout = 0.0,
    seq_len: Annotated[
        str | None,
        typer.Option(
            parser=lengths_text, metavar=flags.METAVAR,
            help=f"Tokens of the sequence, or several with commas; {flags.LENGTH} Default: 8192 per rank; 512 on CPUs.",
        ),
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help=f"Measure only the masks {', '.join(QUICK)}.")] = False,
    resume: Annotated[
        Path | None, typer.Option(help="Append rows to this file, and skip those it has. Default: none.")
    ] = None,
    json_name: JsonName = None,
    markdown_file: Annotated[
        Path | None, typer.Option("--markdown", help="Write a Markdown table. Default: none.")
    ] = None,
    picture: Annotated[
        Path | None, typer.Option(help="Write an SVG picture of all speeds. Default: none.")
    ] = None,
) -> int:  # fmt: skip
    """Compare strategies on this machine: speed, bytes and memory over sixteen masks.

    `--strategies ours` compares the strategies of `plan`; `all` adds the installed peers: implementations of other
    libraries, with the same local kernel if they use flash_attn. `ours,yunchang` adds one of them.
    Results are first compared with float64 on one K/V head; a wrong entry has no speed. All entries of a mask are timed
    in each round, in random order, and the slowest rank counts. TFLOP/s are per rank, by the visible pairs.
    A rank that hangs ends its entry after BURST_TIMEOUT seconds (600 by default).

    Examples:

    burst-portable bench --quick
    burst-portable bench --heads 8 --kv-heads 4 --mask window:64:0
    torchrun --nproc-per-node 2 -m burst_portable bench --resume rows.jsonl --json out.json
    burst-portable bench compare A.json B.json
    burst-portable bench draw A.json --picture A.svg
    """
    if words:
        options = {"--json": json_name, "--markdown": markdown_file, "--picture": picture, "--resume": resume}
        return of_files(words, {name: value for name, value in options.items() if value is not None})
    if layout not in NAMES:
        raise unknown_name("layout", layout, NAMES)
    if dtype is not None and dtype not in _DTYPES:
        raise unknown_name("dtype", dtype, _DTYPES)
    probability = checked_probability(dropout)
    from burst_portable.cli.machine_limits import check_processes

    launcher = read_launcher_env()
    is_first = launcher is None or launcher.rank == 0
    with add_rank_to_errors(launcher):
        json_option = JsonOption(json_name, writes=is_first, sources=[resume])
        if is_first:
            if picture is not None:
                check_picture(picture, sources=[resume])
            check_files({"--markdown": markdown_file, "--picture": picture}, sources=[resume])
        sizes_of_mesh = numbers_of_ranks(ranks, launcher)
        chosen, _ = choose_backend(backend, 1 if launcher else max(sizes_of_mesh, default=1))
        device_type, on_cpu = chosen.capabilities.device_type, not chosen.capabilities.streams
        sizes_of_mesh = sizes_of_mesh or [2 if on_cpu else _device_count(device_type)]
        names_of_kernels = kernel_names(kernels, chosen)
        if on_cpu and launcher is None:
            check_processes(max(sizes_of_mesh))
        setting: dict[str, Any] = {
            **sizes_with_defaults(heads, kv_heads, head_dim, on_cpu=on_cpu),
            "dtype": dtype or ("float32" if on_cpu else "bfloat16"),
            "layout": layout,
            "rounds": 3 if on_cpu else 7,
            **({"dropout": probability} if probability else {}),
        }
        lengths = checked_lengths(seq_len, max(sizes_of_mesh))
        settings: Row = {"schema": SCHEMA, "version": __version__, "backend": chosen.name, **setting}
        settings |= {"device": _device_name(device_type, on_cpu=on_cpu), "versions": versions(_PACKAGES)}
        names = entry_names(strategies, on_cpu=on_cpu)
        names_of_masks = mask_names(masks, own_masks or [], quick=quick)
        rows = _resumed(resume, settings)
        work: dict[int, list[Work]] = {}
        for size in sizes_of_mesh:
            lengths_here = lengths or [512 if on_cpu else 8192 * size]
            check_sizes(names_of_masks, lengths_here, size, setting)
            work[size] = list(product(names_of_masks, lengths_here, names_of_kernels, [names]))
        _measure(_jobs(work, rows, chosen, setting), launcher, rows, settings, resume)
    _sort(rows, work)
    if is_first:
        _show(rows, console(stderr=json_option.stdout))
        json_option.write({"settings": settings, "rows": rows})
        if markdown_file is not None:
            with writing(markdown_file):
                markdown_file.write_text(markdown(rows), encoding="utf-8")
        if picture is not None:
            with writing(picture):
                picture.write_text(draw(settings, rows), encoding="utf-8")
    return _exit_code(rows, is_first=is_first)


def _jobs(work: Mapping[int, Sequence[Work]], rows: Sequence[Row], backend: Backend, setting: Row) -> list[BenchJob]:
    """Return a job for each number of ranks, with the work that has no rows."""
    from burst_portable.cli.bench_worker import BenchJob

    left, device_type = _without(work, {row_key(row) for row in rows}), backend.capabilities.device_type
    return [
        BenchJob(
            ranks=size, ranks_per_node=None, backend=backend.name, device_type=device_type, setting=setting,
            work=left[size],
        )
        for size in work
    ]  # fmt: skip


def _sort(rows: list[Row], work: Mapping[int, Sequence[Work]]) -> None:
    """Sort the rows as the options name them: entries that ended a rank were reported first."""
    every = ((mask, n, size, one, name) for size in work for mask, n, one, names in work[size] for name in names)
    order: dict[object, int] = {key: i for i, key in enumerate(every)}
    rows.sort(key=lambda row: order.get(row_key(row), -1))


def _exit_code(rows: Sequence[Row], *, is_first: bool) -> int:
    """Return 1 if no entry was measured, or one of ours was wrong or failed. The first rank explains the former."""
    if rows and all(row["status"] != "ok" for row in rows):
        if is_first:
            _print_error(f"no entry was measured: {len(rows)} refused, wrong or failed, for the reasons above")
        return 1
    return int(any(row["status"] in ("wrong", "failed") for row in rows if row["entry"] not in PEERS))


def _measure(
    jobs: Sequence[BenchJob], launcher: LauncherEnv | None, rows: list[Row], settings: Row, resume: Path | None
) -> None:
    """Run the jobs and append their rows to `rows`. The first rank also appends them to the file `resume`, if given."""
    from burst_portable.cli.bench_worker import bench_local, bench_rank

    is_first = launcher is None or launcher.rank == 0
    with Progress(**on_stderr(quiet=not is_first)) as bar:
        progress = bar.add_task("measuring", total=sum(len(names) for job in jobs for *_, names in job.work))

        def on_rows(found: list[Row]) -> None:
            rows.extend(found)
            bar.advance(progress, len(found))
            if is_first and resume is not None:
                with writing(resume):
                    append_rows(resume, settings, found)

        try:
            for job in jobs:
                if job.work:
                    bench_local(job, on_rows) if launcher is None else bench_rank(job, launcher, on_rows)
        except (Ended, KeyboardInterrupt):
            bar.stop()
            if is_first:
                _print_error(_interrupted(rows, resume))
            raise


def _show(rows: Sequence[Row], output: Console) -> None:
    """Print the table of the rows, and why entries have no speed."""
    made = table(*COLUMNS, left=("kernel", "strategy"))
    for column in made.columns[COLUMNS.index("strategy") + 1 :]:
        column.max_width = _WIDTH_OF_NUMBERS
    for row in rows:
        made.add_row(*cells(row))
    output.print(made)
    for text, masks_of_reason in reasons(rows).items():
        output.print(labelled("not", f"{text} ({masks_of_reason})"))


def _without(work: Mapping[int, Sequence[Work]], done: Collection[object]) -> dict[int, list[Work]]:
    """Return the work by number of ranks, without entries whose keys (`row_key`) are done."""
    return {
        size: [
            (mask, length, kernel, left)
            for mask, length, kernel, names in parts
            if (left := [name for name in names if (mask, length, size, kernel, name) not in done])
        ]
        for size, parts in work.items()
    }


def _resumed(path: Path | None, settings: Row) -> list[Row]:
    """Return the rows that a file has. Raise `InputError` if its settings differ."""
    if path is None or not path.exists() or not path.stat().st_size:
        return []
    found, rows = read_rows(path)
    check_appendable(path)
    if different := [name for name in {**settings, **found} if found.get(name) != settings.get(name)]:
        name = different[0]
        raise InputError(
            f"--resume names a file with another {name}", got=found.get(name), allowed=settings.get(name),
            next_step="name another file",
        )  # fmt: skip
    return rows


def _interrupted(rows: Sequence[Row], resume: Path | None) -> str:
    """Return what an interrupted command keeps, and how it goes on."""
    words = sys.argv[1:]
    command = shlex.join([PROGRAM, *words]) if words[:1] == ["bench"] else "the same command"
    if not rows:
        return f"interrupted before the first row; to begin again: {command}"
    if resume is None:
        return (
            f"interrupted; {len(rows)} rows are lost; with --resume FILE, rows are kept: {command} --resume rows.jsonl"
        )
    return f"interrupted; {resume} keeps {len(rows)} rows; to go on: {command}"


def _print_error(text: str) -> None:
    if sys.stderr is not None:
        print(f"{PROGRAM}: {text}", file=sys.stderr)


def _device_name(device_type: str, *, on_cpu: bool) -> str:
    if on_cpu:
        return platform.processor() or platform.machine()
    import torch

    return str(torch.get_device_module(device_type).get_device_name())


def _device_count(device_type: str) -> int:
    import torch

    return int(torch.get_device_module(device_type).device_count())
