"""Define `burst-portable run`, which trains or scores with sharded sequences and compares with one device."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from burst_portable.cli import flags
from burst_portable.cli.flags import add_rank_to_errors, number_of_ranks
from burst_portable.cli.output import JsonName, JsonOption, check_folder, json_text, writing
from burst_portable.cli.strategy_flags import with_strategy_flags
from burst_portable.errors import BackendUnavailableError, InputError

if TYPE_CHECKING:
    from burst_portable.cli.run.setup import PreparedJob
    from burst_portable.cli.run.train import Gradients, Outcome
    from burst_portable.cli.run.view import View
    from burst_portable.config import LauncherEnv


_LEARNING_RATE = 1e-3
_RANKS = 2


@with_strategy_flags
def run(
    model: Annotated[
        str,
        typer.Option(help="tiny, a config.json, a folder with one, or the Hub ID of a downloaded model."),
    ] = "tiny",
    text: Annotated[
        str | None, typer.Option(help="Text file of any kind. Default: English text that is part of Python.")
    ] = None,
    seq_len: flags.SeqLen = 4096,
    ranks: Annotated[
        int | None,
        flags.integer_option(
            help=f"Number of local processes to start. Default: {_RANKS}; under torchrun, WORLD_SIZE."
        ),
    ] = None,
    steps: Annotated[
        int | None,
        flags.integer_option(help="Training steps, or batches to score. Default: 10; with --eval, the full text."),
    ] = None,
    batch: Annotated[int, flags.integer_option(help="Sequences per step.")] = 1,
    lr: Annotated[float | None, typer.Option(help=f"Learning rate of AdamW. Default: {_LEARNING_RATE}.")] = None,
    seed: Annotated[int, flags.integer_option(help="Seed of the random weights, and of dropout.")] = 0,
    dropout: Annotated[
        float, typer.Option(help="Probability of dropout of attention weights, by global position.")
    ] = 0.0,
    scoring: Annotated[
        bool, typer.Option("--eval", help="Compute the perplexity of the text instead of training.")
    ] = False,
    backend: flags.BackendName = "auto",
    strategy: Annotated[str, typer.Option(help=flags.STRATEGY)] = "auto",
    layout: flags.Layout = flags.DEFAULT_LAYOUT,
    ranks_per_node: flags.RanksPerNode = None,
    *,
    options: Mapping[str, object],
    dtype: Annotated[
        str, typer.Option(help="float32 or float64; bfloat16 and float16 use autocast with float32 weights.")
    ] = "float32",
    gradient_checkpointing: Annotated[
        bool,
        typer.Option(
            "--gradient-checkpointing", help="Recompute layers in the backward pass: less memory, about 1/3 more FLOPs."
        ),
    ] = False,
    check: Annotated[
        bool, typer.Option("--check/--no-check", help="Repeat the run on one device with plain attention, and compare.")
    ] = False,
    profile: Annotated[
        bool, typer.Option("--profile", help="Print where the time of attention went; --report adds profile.html.")
    ] = False,
    deep: Annotated[
        bool, typer.Option("--deep", help="Like --profile, with torch's tracer: kernels of each step.")
    ] = False,
    ablate: Annotated[
        bool,
        typer.Option(
            "--ablate", help="Like --profile, then time one step without communication, attention kernels, or both."
        ),
    ] = False,
    report: Annotated[
        str | None, typer.Option(help="Folder for report.html and report.json; created if missing. Default: none.")
    ] = None,
    json_name: JsonName = None,
) -> int:
    """Train a Transformers model, or score a text, with each sequence sharded over ranks.

    It starts local processes, or under torchrun uses its ranks. The default model, tiny, has 3 million random weights
    and takes bytes as tokens. --ablate repeats one step 13 times without the optimizer, and needs memory for a second
    set of gradients. Exit code 1 if --check finds a difference.

    Examples:

    burst-portable run --ranks 2 --check
    burst-portable run --model FOLDER_OR_HUB_ID --text FILE --eval
    torchrun --nproc-per-node 8 -m burst_portable run --model CONFIG.json --seq-len 128k
    --dtype bfloat16 --gradient-checkpointing
    """
    if find_spec("transformers") is None:
        raise BackendUnavailableError(
            "run needs the package transformers; in the clone, run: pip install '.[cli,transformers]'"
        )
    from burst_portable.cli.run.job import Job, disable_garbage_collection
    from burst_portable.cli.run.view import View
    from burst_portable.config import read_launcher_env
    from burst_portable.strategies.planner import checked_probability

    with disable_garbage_collection():
        from burst_portable.cli.run.setup import prepare_job

    launcher = read_launcher_env()
    is_first = launcher is None or launcher.rank == 0
    with add_rank_to_errors(launcher):
        json_option = JsonOption(json_name, writes=is_first, sources=(text, model))
        folder = _folder(report, writes=is_first)
        view = View(quiet=not is_first, stderr=json_option.stdout)
        ranks = number_of_ranks(ranks, launcher)
        if scoring and lr is not None:
            raise InputError("--lr requires training", got="--eval", next_step="omit one of them")
        if scoring and dropout:
            raise InputError("--dropout requires training", got="--eval", next_step="omit one of them")
        job = Job(
            model=model,
            text=text,
            seq_len=seq_len,
            ranks=_RANKS if ranks is None else ranks,
            batch=batch,
            learning_rate=_LEARNING_RATE if lr is None else lr,
            seed=seed,
            scoring=scoring,
            backend=backend,
            strategy=strategy,
            ranks_per_node=ranks_per_node,
            options=options,
            layout=layout,
            dtype=dtype,
            gradient_checkpointing=gradient_checkpointing,
            dropout=checked_probability(dropout),
            profile="kernels" if deep else "standard" if profile or ablate else "",
            ablate=ablate,
        )
        prepared = prepare_job(job, steps, local=launcher is None)
        view.heading(prepared, check)
        facts, profile_data = _facts(prepared, launcher, check, view)
    if facts is None:
        return 0
    view.result(facts)
    json_option.write(facts)
    if folder is not None:
        _write_report(facts, profile_data, prepared, folder)
        view.report(folder)
    if profile_data is not None:
        view.profile(profile_data, folder)
    return 1 if facts["failures"] else 0


def _folder(report: str | None, *, writes: bool) -> Path | None:
    if report is None:
        return None
    if not report:
        raise InputError("--report names no folder", got="''", allowed="a folder, created if missing")
    if writes:
        check_folder(Path(report), "--report")
    return Path(report)


def _facts(
    prepared: PreparedJob, launcher: LauncherEnv | None, check: bool, view: View
) -> tuple[dict[str, Any] | None, dict[str, Any] | None]:
    """Run the ranks, then the reference. Return the JSON and the profile, if any; None on other ranks of a launcher."""
    import torch

    from burst_portable.cli.machine_limits import cores
    from burst_portable.cli.run.outcome import facts_of, gradient_error
    from burst_portable.cli.run.train import run_reference
    from burst_portable.cli.run.worker import device_of

    job = prepared.job
    outcomes, gradients = _distributed(prepared, launcher, check, view)
    if view.quiet:
        return None, None
    profile = outcomes[0].profile
    if not check:
        return facts_of(prepared, outcomes, None, None), profile
    device = device_of(job.device_type, launcher.local_rank if launcher else 0)
    threads = torch.get_num_threads()
    torch.set_num_threads(threads if launcher else cores())  # local ranks have ended, all cores are free
    try:
        with view.progress("one device", job.steps) as step:
            reference, expected = run_reference(job, device, lambda history: step(history.losses[-1]))
    finally:
        torch.set_num_threads(threads)
    error = None if job.scoring else gradient_error(gradients, expected)
    return facts_of(prepared, outcomes, reference, error), profile


def _distributed(
    prepared: PreparedJob, launcher: LauncherEnv | None, check: bool, view: View
) -> tuple[list[Outcome], Gradients]:
    """Run the ranks. Return their outcomes in rank order, and the gradients if they are compared."""
    import tempfile

    from burst_portable.cli.run.spawn import run_processes
    from burst_portable.cli.run.train import Outcome, load_gradients
    from burst_portable.cli.run.worker import run_in_launcher

    job = prepared.job
    with view.progress(f"{job.ranks} rank{'s' if job.ranks > 1 else ''}", job.steps) as step:
        if launcher is not None:
            return run_in_launcher(job, launcher, lambda history: step(history.losses[-1]))
        with tempfile.TemporaryDirectory(prefix="burst-portable-") as name:
            folder = Path(name)
            done = run_processes(job, folder, lambda event: step(event["loss"]))
            gradients = load_gradients(folder) if check and not job.scoring else {}
            return [Outcome(**event["outcome"]) for event in done], gradients


def _write_report(facts: dict[str, Any], profile: dict[str, Any] | None, prepared: PreparedJob, folder: Path) -> None:
    from burst_portable.cli.run.page import write_html

    with writing(folder):
        (folder / "report.json").write_text(json_text(facts), encoding="utf-8")
        write_html(facts, prepared.plan, folder / "report.html")
        if profile is not None:
            from burst_portable.profiling.report import Report

            Report(profile).write_json(folder / "profile.json")
            Report(profile).write_html(folder / "profile.html")
