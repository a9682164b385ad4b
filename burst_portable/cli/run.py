"""`burst-portable run`: train a model or score a text, each sequence over ranks, and check that it is exact."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from burst_portable.cli.run_view import View
    from burst_portable.cli.training.prepare import Prepared
    from burst_portable.config import Launched

from burst_portable.errors import BurstError, InputError, explain


def run(
    model: Annotated[
        str, typer.Option(help="tiny, a config's JSON, or a checkpoint's folder (config.json and *.safetensors).")
    ] = "tiny",
    text: Annotated[
        str | None, typer.Option(help="A file of any kind; English that comes with Python unless given.")
    ] = None,
    seq_len: Annotated[int, typer.Option(help="Tokens of a whole sequence.")] = 4096,
    ranks: Annotated[
        int | None, typer.Option(help="Start so many local processes (2 unless given); torchrun's are joined.")
    ] = None,
    steps: Annotated[
        int | None, typer.Option(help="Training steps (10 unless given); with --eval, sequences (all unless given).")
    ] = None,
    batch: Annotated[int, typer.Option(help="Sequences a step.")] = 1,
    lr: Annotated[float, typer.Option(help="AdamW's learning rate.")] = 1e-3,
    seed: Annotated[int, typer.Option(help="Decides random weights.")] = 0,
    scoring: Annotated[bool, typer.Option("--eval", help="Perplexity of the text instead of training.")] = False,
    backend: Annotated[str, typer.Option(help="auto, cpu, cuda, rocm or ascend.")] = "auto",
    strategy: Annotated[str, typer.Option(help="auto, ring, burst, double_ring or ulysses.")] = "auto",
    layout: Annotated[str, typer.Option(help="contiguous, zigzag or striped.")] = "zigzag",
    dtype: Annotated[
        str, typer.Option(help="float32, float64; bfloat16 and float16 are autocast's, over float32 weights.")
    ] = "float32",
    checked: Annotated[
        bool, typer.Option("--check/--no-check", help="Do the same on one device with plain SDPA, and compare.")
    ] = False,
    profiled: Annotated[
        bool, typer.Option("--profile", help="Say where the time of attention went; profile.html in the report folder.")
    ] = False,
    report: Annotated[Path | None, typer.Option(help="A folder for report.html and report.json.")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="A file for the numbers.")] = None,
) -> int:
    """Train a model, or score a text, with each sequence spread over ranks; nobody edits the model.

    Exit code 1 when a check fails, 2 when something that was typed cannot be used.
    """
    from burst_portable.cli.run_view import View
    from burst_portable.cli.training.prepare import check_writable, prepare
    from burst_portable.config import launched

    place = launched()
    view = View(quiet=place is not None and place.rank != 0)
    try:
        check_writable(report, json_file)
        prepared = prepare(
            model=model,
            text=text,
            seq_len=seq_len,
            ranks=_ranks(ranks, place),
            steps=steps,
            batch=batch,
            learning_rate=lr,
            seed=seed,
            scoring=scoring,
            backend=backend,
            strategy=strategy,
            layout=layout,
            dtype=dtype,
            profiled=profiled,
            local=place is None,
        )
    except BurstError:
        if view.quiet:
            return 2  # all ranks refuse the same; the first one says why
        raise
    view.heading(prepared, checked)
    facts, profile = _facts(prepared, place, checked, view)
    if facts is None:
        return 0
    _write(facts, profile, prepared, report, json_file)
    view.verdict(facts, report)
    if profile is not None:
        view.profile(profile, report)
    return 1 if facts["failures"] else 0


def _ranks(asked: int | None, place: Launched | None) -> int:
    if place is None:
        return 2 if asked is None else asked
    if asked not in (None, place.world_size):
        raise InputError(
            explain("--ranks and the launcher disagree", got=f"--ranks {asked}", allowed=f"{place.world_size}, or none")
        )
    return place.world_size


def _facts(
    prepared: Prepared, place: Launched | None, checked: bool, view: View
) -> tuple[dict[str, Any] | None, dict[str, Any] | None]:
    """Run the ranks, then the reference; what is known then, and the profile if one was wanted.

    None on ranks that have nothing to tell.
    """
    import torch

    from burst_portable.cli.training.outcome import facts_of, gradient_differences
    from burst_portable.cli.training.prepare import cores
    from burst_portable.cli.training.rank import run_reference
    from burst_portable.cli.training.worker import device_of

    job = prepared.job
    outcomes, gradients = _distributed(prepared, place, checked, view)
    if view.quiet:
        return None, None
    profile = outcomes[0].profile
    if not checked:
        return facts_of(prepared, outcomes, None, None), profile
    device = device_of(job.device_type, place.local_rank if place else 0)
    threads = torch.get_num_threads()
    torch.set_num_threads(threads if place else cores())  # where no rank runs any more, all cores are free
    try:
        with view.progress("one device", job.steps) as step:
            reference, expected = run_reference(job, device, lambda course: step(course.losses[-1]))
    finally:
        torch.set_num_threads(threads)
    apart = None if job.scoring else gradient_differences(gradients, expected)
    return facts_of(prepared, outcomes, reference, apart), profile


def _distributed(
    prepared: Prepared, place: Launched | None, checked: bool, view: View
) -> tuple[list[Any], dict[str, Any]]:
    """Outcomes in rank order and, where they are to be checked, the gradients."""
    import tempfile

    from burst_portable.cli.training.joined import run_joined
    from burst_portable.cli.training.launch import run_processes
    from burst_portable.cli.training.rank import Outcome, load_gradients

    job = prepared.job
    with view.progress(f"{job.ranks} rank{'s' if job.ranks > 1 else ''}", job.steps) as step:
        if place is not None:
            return run_joined(job, place, lambda course: step(course.losses[-1]))
        with tempfile.TemporaryDirectory(prefix="burst-portable-") as name:
            folder = Path(name)
            done = run_processes(job, folder, lambda event: step(event["loss"]))
            gradients = load_gradients(folder) if checked and not job.scoring else {}
            return [Outcome(**event["outcome"]) for event in done], gradients


def _write(
    facts: dict[str, Any],
    profile: dict[str, Any] | None,
    prepared: Prepared,
    report: Path | None,
    json_file: Path | None,
) -> None:
    from burst_portable.cli.training.outcome import finite

    text = json.dumps(finite(facts), indent=2, allow_nan=False) + "\n"
    if json_file is not None:
        json_file.write_text(text, encoding="utf-8")
    if report is not None:
        from burst_portable.cli.report import write_html

        (report / "report.json").write_text(text, encoding="utf-8")
        write_html(facts, prepared.plan, report / "report.html")
        if profile is not None:
            from burst_portable.profiling.report import Report

            Report(profile).write_json(report / "profile.json")
            Report(profile).write_html(report / "profile.html")
