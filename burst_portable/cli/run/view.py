"""Print the settings, the progress and the result of `burst-portable run`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

from burst_portable.cli.output import console, table
from burst_portable.utils.text import beside, bytes_text, percent, scaled, seconds_text

if TYPE_CHECKING:
    from burst_portable.cli.run.setup import PreparedJob
    from burst_portable.planning.plans import Plan

_LABELS = {  # by status: label and style
    "ok": ("PASSED", "bold green"),
    "failed": ("FAILED", "bold red"),
    "unchecked": ("NOT CHECKED", "bold yellow"),
}

_LABEL_WIDTH = 8
_TENSORS = {"kv": "K and V", "q": "Q, dO", "both": "K and V, or queries,"}


class View:
    """Print to stdout, or to stderr if stdout has JSON. `quiet` ranks print nothing."""

    def __init__(self, *, quiet: bool = False, stderr: bool = False) -> None:
        self.quiet = quiet
        self._console = console(stderr=stderr, quiet=quiet, soft_wrap=True)

    def heading(self, prepared: PreparedJob, check: bool) -> None:
        """Print the settings of the run."""
        job, model, plan = prepared.job, prepared.model, prepared.plan
        work = f"{'score' if job.scoring else 'train'} {_count(job.steps, _unit(job.scoring))}"
        ranks = f"over {_count(job.ranks, 'rank')} on {job.backend}"
        dtype = f"{job.dtype}, gradient checkpointing" if job.gradient_checkpointing else job.dtype
        dtype += f", attention dropout {job.dropout:g}" if job.dropout else ""
        self._console.print(f"[bold]{work}[/] of {job.batch} x {job.seq_len:,} tokens {ranks}, {dtype}")
        if prepared.backend_reason:
            self._line("", prepared.backend_reason, indent=2, style="dim")
        self._line(
            "model",
            f"{model['name']}: {model['type']}, {model['parameters'] / 1e6:.1f} M parameters, "
            f"{model['layers']} layers, {model['heads']} heads, {model['kv_heads']} K/V heads",
            indent=2,
        )
        self._line("text", prepared.text, indent=2)
        settings = f"{plan.label}: {_describe_communication(plan)}; layout {job.layout}, mask {plan.call.mask}"
        self._line("plan", settings, indent=2)
        if plan.reason:
            self._line("", plan.reason, indent=2, style="dim")
        text = "compare with one device, plain attention" if check else "off (--check compares with one device)"
        self._line("check", text, indent=2)

    @contextmanager
    def progress(self, description: str, steps: int) -> Iterator[Callable[[float], None]]:
        """Show a bar, and yield a callback that gets the loss after each step."""
        columns = (
            TextColumn("  {task.description:<12}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[loss]}"),
        )
        with Progress(*columns, console=self._console, disable=self.quiet) as bar:
            task = bar.add_task(description, total=steps, loss="starting")
            yield lambda loss: bar.update(task, advance=1, loss=f"loss {loss:.4f}")

    def result(self, facts: dict[str, Any]) -> None:
        """Print the result in one line, and a table."""
        self._console.print()
        label, label_style = _LABELS[facts["status"]]
        self._line(label, result_text(facts), label_style=label_style)
        checked = bool(facts["reference_losses"])
        rows = table("", _count(facts["world_size"], "rank"), *(["one device"] if checked else []))
        for row in summary(facts):
            rows.add_row(*(row if checked else row[:2]))
        self._console.print("", rows, "")
        self._line("times", timing_text(facts), style="dim")
        self._line("MFU", mfu_text(facts), style="dim")
        self._line("kernel", kernels_text(facts), style="dim")
        for note in facts["notes"]:
            self._line("note", note)

    def report(self, folder: Path) -> None:
        """Print the path of the report."""
        self._console.print(f"report  {folder / 'report.html'}", markup=False)

    def profile(self, profile: dict[str, Any], report: Path | None) -> None:
        """Print the summary of the profile, or all of it if no report was written."""
        if report is None:
            from burst_portable.profiling.report.terminal import show

            show(profile, self._console)
            return
        from burst_portable.profiling.report.tables import ablation_text

        self._line("time", profile["summary"]["text"])
        if advice := profile["summary"]["recommendation"]:
            self._line("advice", advice)
        if ablated := ablation_text(profile):
            self._line("ablated", ablated)
        self._console.print(f"profile {report / 'profile.html'}", markup=False)

    def _line(self, label: str, text: str, *, indent: int = 0, style: str = "", label_style: str = "") -> None:
        """Print a label and a text. On a terminal, the text wraps in its own column."""
        begin = " " * indent + f"{label:<{_LABEL_WIDTH - 1}} "
        text = beside(begin, text, self._console.width if self._console.is_terminal else None)
        self._console.print(Text.assemble((begin, label_style), text), style=style)


def result_text(facts: dict[str, Any]) -> str:
    """Return the result of a run as a sentence."""
    if facts["failures"]:
        return "; ".join(facts["failures"])
    steps = _count(facts["steps"], _unit(facts["mode"] == "perplexity"))
    if facts["status"] == "unchecked":
        return f"{steps} done; not compared with one device"
    match = "matches" if facts["steps"] == 1 else "match"
    text = f"{steps} {match} one device: losses within {facts['max_relative_difference']:.1e}"
    if (gradient := facts["gradient_relative_difference"]) is not None:
        text += f", final gradients within {gradient:.1e}"
    return f"{text} (relative, {facts['dtype']})"


def timing_text(facts: dict[str, Any]) -> str:
    """Describe how times and rates are averaged."""
    unit = _unit(facts["mode"] == "perplexity")
    units = "batches" if unit == "batch" else "steps"
    scope = (
        f"the only {unit} (with warm-up)" if facts["steps"] == 1 else f"mean over all {units} but the first (warm-up)"
    )
    text = f"{scope}; {facts['batch'] * facts['seq_len']:,} tokens per {unit}, timed on the slowest rank"
    return f"{text}; one device checks numbers and is no baseline of speed" if facts["reference_losses"] else text


def mfu_text(facts: dict[str, Any]) -> str:
    """Describe the model FLOP utilization, or why it is unknown."""
    peak, flops = facts["peak"], facts["model_flops_per_step"]
    if flops is None:
        return "unknown: FLOPs of a mixture of experts are not counted"
    if facts["mfu"] is None:
        return f"unknown: the device's peak in {peak['dtype']} is not known ({peak['source']})"
    per_step = f"{scaled(flops, 'FLOP')} of the model per {_unit(facts['mode'] == 'perplexity')}"
    peaks = f"{facts['world_size']} x {scaled(peak['flops'], 'FLOP/s')} in {peak['dtype']} ({peak['source']})"
    return f"{per_step}, divided by its time and by {peaks}"


def kernels_text(facts: dict[str, Any]) -> str:
    """Name the kernels that computed attention, with reasons."""
    return ", ".join(f"{name} ({reason})" for name, reason in facts["kernels"].items()) or "none"


def _unit(scoring: bool) -> str:
    return "batch" if scoring else "step"


def _count(number: int, unit: str) -> str:
    plural = "es" if unit == "batch" else "s"
    return f"{number:,} {unit}{'' if number == 1 else plural}"


def _describe_communication(plan: Plan) -> str:
    """Describe which tensors each pass communicates."""
    if plan.call.ranks == 1:
        return "no communication"
    if plan.heads and plan.ring_size == 1:
        return "all-to-all of tokens and heads"
    size = plan.head_parallel_size
    where = f"across {size} nodes" if plan.head_spacing > 1 else f"in nodes of {size}"
    in_nodes = f"all-to-all of tokens and heads {where}; " if plan.heads else ""
    return in_nodes + ", ".join(
        f"{name} {_TENSORS[pass_plan.circulates]} {pass_plan.route.description}" for name, pass_plan in plan.passes()
    )


def summary(facts: dict[str, Any]) -> list[tuple[str, str, str]]:
    """Return rows of (name, value over ranks, value on one device)."""
    reference = facts["reference_losses"]

    def both(name: str, key: str, text: Callable[[float], str]) -> tuple[str, str, str]:
        expected = facts[f"reference_{key}"]
        return name, text(facts[key]), "-" if expected is None else text(expected)

    rows = []
    if facts["mode"] == "perplexity":
        rows.append(both("perplexity", "perplexity", lambda x: f"{x:.8g}"))
    else:
        rows.append(("first loss", f"{facts['losses'][0]:.6f}", f"{reference[0]:.6f}" if reference else "-"))
        rows.append(("last loss", f"{facts['losses'][-1]:.6f}", f"{reference[-1]:.6f}" if reference else "-"))
    for name, key, limit in (
        ("losses differ by", "max_relative_difference", "loss"),
        ("gradients differ by", "gradient_relative_difference", "gradient"),
        ("largest difference of one parameter", "worst_gradient_relative_difference", "parameter"),
    ):
        if reference and facts[key] is not None:
            rows.append((name, f"{facts[key]:.2e}", f"allowed {facts['tolerances'][limit]:.0e}"))
    rows.append(both("tokens per second", "tokens_per_second", lambda x: f"{x:,.0f}"))
    rows.append(both(f"seconds per {_unit(facts['mode'] == 'perplexity')}", "seconds_per_step", seconds_text))
    share = facts["mfu"]
    rows.append(("model FLOP utilization", "unknown" if share is None else percent(share), "-"))
    rows.append(("peak memory per rank", bytes_text(max(facts["peak_memory_bytes"])), "-"))
    return rows
