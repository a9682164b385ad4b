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
from burst_portable.bench.masks import MASKS, named_mask
from burst_portable.bench.peer_names import PEERS, available_peers, versions
from burst_portable.bench.results import (
    COLUMNS,
    NOISE,
    SCHEMA,
    Row,
    append_rows,
    cells,
    check_appendable,
    differences,
    markdown,
    read_rows,
    reasons,
    row_key,
)
from burst_portable.bench.results import compare as compare_rows
from burst_portable.cli import PROGRAM, flags
from burst_portable.cli.backend_choice import choose_backend
from burst_portable.cli.flags import add_rank_to_errors, number_of_ranks, tokens
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
from burst_portable.errors import InputError, LayoutError, MaskError, format_error, shown, unknown_name
from burst_portable.layout import NAMES
from burst_portable.planning.plans import PASSES
from burst_portable.strategies.planner import call_of_sizes, checked_probability
from burst_portable.strategies.registry import known, make_strategy, strategy_name
from burst_portable.utils.text import split_list

if TYPE_CHECKING:
    from rich.console import Console

    from burst_portable.backends.base import Backend
    from burst_portable.cli.bench_worker import BenchJob, Work

_DTYPES = ("float32", "bfloat16", "float16")
_PACKAGES = ("torch", "triton", "ring-flash-attn", "yunchang", "magi-attention", "flash-attn-4")
_LONGEST = 1 << 24  # tokens
_GROUPS_OF_ENTRIES = ("all", "ours")
"""Words in `--strategies`: ours are the strategies of the registry; all, also those of other libraries that can run."""
_QUICK = ("full", "causal", "causal_document")
_WIDTH_OF_NUMBERS = 8  # so that headers wrap, and names of strategies do not


def _lengths(text: str) -> str:
    """Check numbers of tokens that are separated by commas."""
    for one in text.split(","):
        tokens(one)
    return text


def _counts(text: str) -> str:
    """Check numbers of ranks that are separated by commas."""
    for one in text.split(","):
        if not (one.isascii() and one.isdigit() and int(one[:9]) > 0 and len(one) < 9):
            got, allowed = shown(one), "numbers from 1, separated by commas"
            raise typer.BadParameter(format_error("not a number of ranks", got=got, allowed=allowed))
    return text


def bench(
    words: Annotated[
        list[str] | None,
        typer.Argument(metavar="[compare A B | draw A]", help="Compare or draw files. Default: measure."),
    ] = None,
    ranks: Annotated[
        str | None,
        typer.Option(
            parser=_counts, metavar="N,...",
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
            parser=_lengths, metavar=flags.METAVAR,
            help=f"Tokens of the sequence, or several with commas; {flags.LENGTH} Default: 8192 per rank; 512 on CPUs.",
        ),
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help=f"Measure only the masks {', '.join(_QUICK)}.")] = False,
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
        return _of_files(words, {name: value for name, value in options.items() if value is not None})
    if layout not in NAMES:
        raise unknown_name("layout", layout, NAMES)
    if dtype is not None and dtype not in _DTYPES:
        raise unknown_name("dtype", dtype, _DTYPES)
    probability = checked_probability(dropout)
    from burst_portable.cli.bench_worker import BenchJob
    from burst_portable.cli.run.job import check_processes

    launcher = read_launcher_env()
    is_first = launcher is None or launcher.rank == 0
    with add_rank_to_errors(launcher):
        json_option = JsonOption(json_name, writes=is_first, sources=[resume])
        if is_first:
            if picture is not None:
                check_picture(picture, sources=[resume])
            check_files({"--markdown": markdown_file, "--picture": picture}, sources=[resume])
        sizes_of_mesh = _numbers_of_ranks(ranks, launcher)
        chosen, _ = choose_backend(backend, 1 if launcher else max(sizes_of_mesh, default=1))
        device_type, on_cpu = chosen.capabilities.device_type, not chosen.capabilities.streams
        sizes_of_mesh = sizes_of_mesh or [2 if on_cpu else _device_count(device_type)]
        kernel_names = _kernel_names(kernels, chosen)
        if on_cpu and launcher is None:
            check_processes(max(sizes_of_mesh))
        setting: dict[str, Any] = {
            **_sizes(heads, kv_heads, head_dim, on_cpu=on_cpu),
            "dtype": dtype or ("float32" if on_cpu else "bfloat16"),
            "layout": layout,
            "rounds": 3 if on_cpu else 7,
            **({"dropout": probability} if probability else {}),
        }
        lengths = _checked_lengths(seq_len, max(sizes_of_mesh))
        settings: Row = {"schema": SCHEMA, "version": __version__, "backend": chosen.name, **setting}
        settings |= {"device": _device_name(device_type, on_cpu=on_cpu), "versions": versions(_PACKAGES)}
        names = _strategies(strategies, on_cpu=on_cpu)
        mask_names = _mask_names(masks, own_masks or [], quick=quick)
        rows = _resumed(resume, settings)
        work: dict[int, list[Work]] = {}
        for size in sizes_of_mesh:
            lengths_here = lengths or [512 if on_cpu else 8192 * size]
            _check_sizes(mask_names, lengths_here, size, setting)
            work[size] = list(product(mask_names, lengths_here, kernel_names, [names]))
        left = _without(work, {row_key(row) for row in rows})
        jobs = [
            BenchJob(
                ranks=size, ranks_per_node=None, backend=chosen.name, device_type=device_type, setting=setting,
                work=left[size],
            )
            for size in sizes_of_mesh
        ]  # fmt: skip
        _measure(jobs, launcher, rows, settings, resume)
    every = ((mask, n, size, one, name) for size in work for mask, n, one, names in work[size] for name in names)
    order: dict[object, int] = {key: i for i, key in enumerate(every)}
    rows.sort(key=lambda row: order.get(row_key(row), -1))  # entries that ended a rank are reported first
    if is_first:
        _show(rows, console(stderr=json_option.stdout))
        json_option.write({"settings": settings, "rows": rows})
        if markdown_file is not None:
            with writing(markdown_file):
                markdown_file.write_text(markdown(rows), encoding="utf-8")
        if picture is not None:
            with writing(picture):
                picture.write_text(draw(settings, rows), encoding="utf-8")
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


def _kernel_names(text: str, backend: Backend) -> list[str]:
    """Return the names of `--kernels`. Raise `UnknownNameError` for a kernel that the backend does not have."""
    from burst_portable.backends.selection import kernels_of

    names = list(dict.fromkeys(split_list(text)))
    known_kernels = ["auto", *(one.name for one in kernels_of(backend))]
    for one in names:
        if one not in known_kernels:
            raise unknown_name(f"kernel of the backend {backend.name!r}", one, known_kernels)
    return names


def _checked_lengths(text: str | None, ranks: int) -> list[int]:
    """Return the lengths of `--seq-len`, if it is given. Raise `InputError` for one that `ranks` ranks cannot hold."""
    lengths = list(dict.fromkeys(map(tokens, text.split(",")))) if text else []
    if lengths and max(lengths) > _LONGEST:
        allowed = f"at most {_LONGEST:,} tokens, because every rank compares with the unsharded tensors"
        raise InputError("a sequence is too long", got=f"--seq-len {text}", allowed=allowed)
    if lengths and min(lengths) < ranks:
        raise InputError("a sequence is too short", got=f"--seq-len {text}", allowed=f"at least {ranks} tokens")
    return lengths


def _sizes(heads: int | None, kv_heads: int | None, head_dim: int | None, *, on_cpu: bool) -> dict[str, int]:
    """Return heads, K/V heads and head size, with defaults for those that are not given."""
    default_heads, default_kv_heads, default_head_dim = (4, 2, 32) if on_cpu else (64, 8, 128)
    if kv_heads is None:
        kv_heads = default_kv_heads if heads is None else heads
    return {
        "heads": default_heads if heads is None else heads,
        "kv_heads": kv_heads,
        "head_dim": default_head_dim if head_dim is None else head_dim,
    }


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


def _numbers_of_ranks(text: str | None, launcher: LauncherEnv | None) -> list[int]:
    """Return the numbers of ranks of `--ranks` or of the launcher; none if neither is given."""
    given = list(dict.fromkeys(map(int, text.split(",")))) if text else []
    if launcher is not None and len(given) > 1:
        allowed = f"{launcher.world_size}, or no --ranks"
        raise InputError("a launcher starts one number of ranks", got=f"--ranks {text}", allowed=allowed)
    found = number_of_ranks(given[0] if given else None, launcher)
    return given or ([] if found is None else [found])


def _device_name(device_type: str, *, on_cpu: bool) -> str:
    if on_cpu:
        return platform.processor() or platform.machine()
    import torch

    return str(torch.get_device_module(device_type).get_device_name())


def _device_count(device_type: str) -> int:
    import torch

    return int(torch.get_device_module(device_type).device_count())


def _strategies(text: str, *, on_cpu: bool) -> list[str]:
    """Return names of entries. "ours" and "all" are those of several: see `_GROUPS_OF_ENTRIES`."""
    chosen: list[str] = []
    for one in split_list(text):
        if one in _GROUPS_OF_ENTRIES:
            chosen += [*known(), *(available_peers(on_cpu=on_cpu) if one == "all" else ())]
        elif strategy_name(one) in known():
            make_strategy(one)
            chosen.append(one)
        elif one in PEERS:
            chosen.append(one)
        else:
            raise unknown_name("strategy", one, [*_GROUPS_OF_ENTRIES, *known(), *PEERS])
    return list(dict.fromkeys(chosen))


def _mask_names(text: str | None, own: Sequence[str], *, quick: bool) -> list[str]:
    """Return the names of `--masks`, then the short forms of `--mask`. Without `--masks`: `own`, or else all masks."""
    names = [] if text is None and own else list(MASKS) if text in (None, "all") else str(text).split(",")
    for one in names:
        if one not in MASKS:
            if ":" in one:
                got, allowed = f"--masks {text}", ", ".join(MASKS)
                next_step = f"pass short forms with --mask, once for each: --mask {one}"
                raise InputError("--masks takes names of masks", got=got, allowed=allowed, next_step=next_step)
            raise unknown_name("mask", one, MASKS)
    if quick and text in (None, "all"):
        names = list(_QUICK) if names else []
    return list(dict.fromkeys([*names, *own]))


def _check_sizes(masks: Sequence[str], lengths: Sequence[int], ranks: int, setting: Mapping[str, Any]) -> None:
    """Raise `InputError` if heads, or a mask and a length, do not fit together, before any rank starts."""
    sizes = {name: setting[name] for name in ("heads", "kv_heads", "head_dim", "layout")}
    for name in masks:
        for length in lengths:
            try:
                mask = named_mask(name, length)
                call_of_sizes(seq_len=length, ranks=ranks, mask=mask, itemsize=4, **sizes)
            except LayoutError as error:
                next_step = "name masks of documents: --masks causal,causal_document, or --mask documents:0,END,END"
                raise LayoutError(f"the mask {name}: {error}", next_step=next_step) from error
            except MaskError as error:
                raise MaskError(f"the mask {name} for --seq-len {length}: {error}") from error


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


def _of_files(words: list[str], options: dict[str, Any]) -> int:
    """Compare or draw files that earlier calls wrote. `options` are those that were given."""
    command, *names = words
    if (command, len(names)) not in (("compare", 2), ("draw", 1)):
        allowed = "compare A.json B.json, or draw A.json --picture A.svg"
        raise InputError("bench takes no such words", got=" ".join(words), allowed=allowed)
    option = "--json" if command == "compare" else "--picture"
    if not_used := sorted(options.keys() - {option}):
        raise InputError(f"bench {command} has no such option", got=", ".join(not_used), allowed=f"{option} FILE")
    if command == "compare":
        return _compare(Path(names[0]), Path(names[1]), JsonOption(options.get(option), sources=names))
    if option not in options:
        raise InputError("bench draw has no file to write", allowed="--picture FILE.svg")
    settings, rows = read_rows(Path(names[0]))
    if not rows:
        raise InputError(f"{names[0]} has no rows to draw", next_step="name a file with rows of `bench`")
    check_picture(options[option], sources=names)
    with writing(options[option]):
        options[option].write_text(draw(settings, rows), encoding="utf-8")
    return 0


def _compare(before: Path, after: Path, json_option: JsonOption) -> int:
    """Print the speeds of the second file over those of the first, and what else differs."""
    files = read_rows(before), read_rows(after)
    lines, notes = compare_rows(files[0][1], files[1][1]), differences(*files)
    if not lines:
        got = "; ".join(notes) or "no rows"
        raise InputError("the two files have no row in common", got=got, next_step="measure equal masks and sizes")
    made = table("row", "forward", "backward", title=f"speed of {after} over {before}")
    for line in lines:
        made.add_row(*line)
    output = console(stderr=json_option.stdout)
    output.print(made)
    if noisy := sum(value.endswith(NOISE) for line in lines for value in line[1:]):
        output.print(
            labelled("warning", f"{noisy} marked{NOISE} are within the spread of repeats: no difference shown")
        )
    for note in notes:
        output.print(labelled("differs", note))
    rows: list[Row] = []
    for label, *values in lines:
        named = dict(zip(PASSES, values, strict=True))
        plain: Row = {name: value.removesuffix(NOISE) for name, value in named.items()}
        rows.append({"row": label, **plain, "within_spread": [name for name in PASSES if named[name] != plain[name]]})
    json_option.write({"rows": rows, "differences": notes})
    return 0
