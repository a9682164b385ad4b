"""`burst-portable run`: train a model or score a text, each sequence over ranks, and check that it is exact."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from burst_portable.backends.selection import known
from burst_portable.cli import PROGRAM
from burst_portable.cli.flags import (
    LAYOUT,
    LENGTH,
    METAVAR,
    RANKS_PER_NODE,
    STRATEGY,
    naming_rank,
    ranks_asked,
    tokens,
    with_strategy_flags,
)
from burst_portable.cli.output import JSON_HELP, JsonOption, check_folder, json_text, writing
from burst_portable.errors import BackendUnavailableError, InputError

if TYPE_CHECKING:
    from burst_portable.cli.run.setup import Prepared
    from burst_portable.cli.run.train import Gradients, Outcome
    from burst_portable.cli.run.view import View
    from burst_portable.config import Launched


_LEARNING_RATE = 1e-3
_RANKS = 2


@with_strategy_flags
def run(
    model: Annotated[
        str,
        typer.Option(
            help="tiny (3 million random weights over bytes), a config's JSON file, or a checkpoint's folder "
            "(config.json and *.safetensors)."
        ),
    ] = "tiny",
    text: Annotated[
        str | None, typer.Option(help="A file of any kind; unless given, English that comes with Python.")
    ] = None,
    seq_len: Annotated[
        int, typer.Option(parser=tokens, metavar=METAVAR, help=f"Tokens of a whole sequence; {LENGTH}")
    ] = 4096,
    ranks: Annotated[
        int | None,
        typer.Option(help=f"Start so many local processes, {_RANKS} unless given; torchrun's are joined."),
    ] = None,
    steps: Annotated[
        int | None,
        typer.Option(help="Training steps, or with --eval, batches to score; unless given, 10, or all of the text."),
    ] = None,
    batch: Annotated[int, typer.Option(help="Sequences a step.")] = 1,
    lr: Annotated[float | None, typer.Option(help="AdamW's learning rate, 0.001 unless given.")] = None,
    seed: Annotated[int, typer.Option(help="Decides random weights.")] = 0,
    scoring: Annotated[bool, typer.Option("--eval", help="Perplexity of the text instead of training.")] = False,
    backend: Annotated[
        str,
        typer.Option(help=f"auto, {', '.join(known())}; `{PROGRAM} doctor` says which can run here, and why not."),
    ] = "auto",
    strategy: Annotated[str, typer.Option(help=STRATEGY)] = "auto",
    layout: Annotated[
        str,
        typer.Option(help=LAYOUT),
    ] = "auto",
    ranks_per_node: Annotated[int | None, typer.Option(help=RANKS_PER_NODE)] = None,
    *,
    options: Mapping[str, object],
    dtype: Annotated[
        str, typer.Option(help="float32, float64; bfloat16 and float16 are autocast's, over float32 weights.")
    ] = "float32",
    gradient_checkpointing: Annotated[
        bool,
        typer.Option(
            "--gradient-checkpointing",
            help="Recompute layers in the backward pass: less memory, about 1/3 more FLOPs.",
        ),
    ] = False,
    checked: Annotated[
        bool, typer.Option("--check/--no-check", help="Do the same on one device with plain attention, and compare.")
    ] = False,
    profiled: Annotated[
        bool, typer.Option("--profile", help="Say where the time of attention went; profile.html in the report folder.")
    ] = False,
    deep: Annotated[
        bool, typer.Option("--deep", help="--profile with torch's tracer beside it: which kernels ran at which step.")
    ] = False,
    ablated: Annotated[
        bool,
        typer.Option(
            "--ablate",
            help="--profile, and at the end one step 13 times more, without learning: as it is, and without "
            "attention's messages, its kernels, or both. Says what each adds; holds a second set of gradients.",
        ),
    ] = False,
    report: Annotated[
        str | None, typer.Option(help="A folder for report.html and report.json; made if absent.")
    ] = None,
    json_name: Annotated[str | None, typer.Option("--json", metavar="[FILE]", help=JSON_HELP)] = None,
) -> int:
    """Train a model, or score a text, with each sequence spread over ranks; nobody edits the model.

    Local ranks are processes of this machine; under torchrun it joins the ranks that are there.

    Examples:

    burst-portable run --ranks 2 --check
    burst-portable run --model CHECKPOINT_DIR --text FILE --eval
    torchrun --nproc-per-node 8 -m burst_portable run --model CONFIG.json --seq-len 131072
    """
    if find_spec("transformers") is None:
        raise BackendUnavailableError(
            "run needs the package transformers; in the clone, run: pip install '.[cli,transformers]'"
        )
    from burst_portable.cli.run.job import without_collector
    from burst_portable.cli.run.view import View
    from burst_portable.config import launched

    with without_collector():
        from burst_portable.cli.run.setup import prepare

    place = launched()
    first = place is None or place.rank == 0
    with naming_rank(place):
        json_option = JsonOption(json_name, writes=first, sources=(text, model))
        folder = _folder(report, writes=first)
        view = View(quiet=not first, stderr=json_option.stdout)
        asked = ranks_asked(ranks, place)
        prepared = prepare(
            model=model,
            text=text,
            seq_len=seq_len,
            ranks=_RANKS if asked is None else asked,
            steps=steps,
            batch=batch,
            learning_rate=_learning_rate(lr, scoring),
            seed=seed,
            scoring=scoring,
            backend=backend,
            strategy=strategy,
            ranks_per_node=ranks_per_node,
            options=options,
            layout=layout,
            dtype=dtype,
            gradient_checkpointing=gradient_checkpointing,
            profiled="deep" if deep else "session" if profiled or ablated else "",
            ablated=ablated,
            local=place is None,
        )
        view.heading(prepared, checked)
        facts, profile = _facts(prepared, place, checked, view)
    if facts is None:
        return 0
    view.verdict(facts)
    json_option.write(facts)
    if folder is not None:
        _write_report(facts, profile, prepared, folder)
        view.report(folder)
    if profile is not None:
        view.profile(profile, folder)
    return 1 if facts["failures"] else 0


def _folder(report: str | None, *, writes: bool) -> Path | None:
    if report is None:
        return None
    if not report:
        raise InputError("--report names no folder", got="''", allowed="a folder, made if absent")
    if writes:
        check_folder(Path(report), "--report")
    return Path(report)


def _learning_rate(asked: float | None, scoring: bool) -> float:
    if scoring and asked is not None:
        raise InputError(
            "--lr has no meaning where nothing is learned", got="--eval", next_step="leave one of them out"
        )
    return _LEARNING_RATE if asked is None else asked


def _facts(
    prepared: Prepared, place: Launched | None, checked: bool, view: View
) -> tuple[dict[str, Any] | None, dict[str, Any] | None]:
    """Run the ranks, then the reference; what is known then, and the profile if one was wanted.

    None on ranks that have nothing to tell.
    """
    import torch

    from burst_portable.cli.run.job import cores
    from burst_portable.cli.run.outcome import facts_of, gradient_differences
    from burst_portable.cli.run.train import run_reference
    from burst_portable.cli.run.worker import device_of

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
) -> tuple[list[Outcome], Gradients]:
    """Outcomes in rank order and, where they are to be checked, the gradients."""
    import tempfile

    from burst_portable.cli.run.spawn import run_processes
    from burst_portable.cli.run.torchrun import run_joined
    from burst_portable.cli.run.train import Outcome, load_gradients

    job = prepared.job
    with view.progress(f"{job.ranks} rank{'s' if job.ranks > 1 else ''}", job.steps) as step:
        if place is not None:
            joined = run_joined(job, place, lambda course: step(course.losses[-1]))
            assert joined is not None, "what goes wrong there is raised"
            return joined
        with tempfile.TemporaryDirectory(prefix="burst-portable-") as name:
            folder = Path(name)
            done = run_processes(job, folder, lambda event: step(event["loss"]))
            gradients = load_gradients(folder) if checked and not job.scoring else {}
            return [Outcome(**event["outcome"]) for event in done], gradients


def _write_report(facts: dict[str, Any], profile: dict[str, Any] | None, prepared: Prepared, folder: Path) -> None:
    from burst_portable.cli.run.page import write_html

    with writing(folder):
        (folder / "report.json").write_text(json_text(facts), encoding="utf-8")
        write_html(facts, prepared.plan, folder / "report.html")
        if profile is not None:
            from burst_portable.profiling.report import Report

            Report(profile).write_json(folder / "profile.json")
            Report(profile).write_html(folder / "profile.html")
