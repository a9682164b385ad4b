"""What `burst-portable run` shows: what it is about to do, how far it is, and the verdict."""

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
    from burst_portable.cli.run.setup import Prepared
    from burst_portable.planning.plans import Plan

_MARKS = {  # by verdict: the word, and how it looks
    "ok": ("PASSED", "bold green"),
    "failed": ("FAILED", "bold red"),
    "unchecked": ("NOT CHECKED", "bold yellow"),
}

_LABEL = 8  # characters
_SIDES = {"kv": "K and V", "q": "Q, dO"}


class View:
    """A console; `quiet` on ranks that leave the talking to the first, `stderr` where stdout is for JSON."""

    def __init__(self, *, quiet: bool = False, stderr: bool = False) -> None:
        self.quiet = quiet
        self._console = console(stderr=stderr, quiet=quiet, soft_wrap=True)

    def heading(self, prepared: Prepared, checked: bool) -> None:
        """What is about to happen."""
        job, model, plan = prepared.job, prepared.model, prepared.plan
        work = f"{'score' if job.scoring else 'train'} {_count(job.steps, _unit(job.scoring))}"
        say = self._console.print
        where = f"over {_count(job.ranks, 'rank')} on {job.backend}"
        how = f"{job.dtype}, gradient checkpointing" if job.gradient_checkpointing else job.dtype
        say(f"[bold]{work}[/] of {job.batch} x {job.seq_len:,} tokens {where}, {how}")
        if prepared.backend_reason:
            self._tell("", prepared.backend_reason, indent=2, style="dim")
        self._tell(
            "model",
            f"{model['name']}: {model['type']}, {model['parameters'] / 1e6:.1f} M parameters, "
            f"{model['layers']} layers, {model['heads']} heads, {model['kv_heads']} K/V heads",
            indent=2,
        )
        self._tell("text", prepared.text, indent=2)
        planned = f"{plan.strategy}: {_travels(plan)}; layout {job.layout}, mask {plan.call.mask}"
        self._tell("plan", planned, indent=2)
        if plan.reason:
            self._tell("", plan.reason, indent=2, style="dim")
        then = "then the same on one device with plain attention" if checked else "nothing is checked (--check would)"
        self._tell("check", then, indent=2)

    @contextmanager
    def progress(self, what: str, steps: int) -> Iterator[Callable[[float], None]]:
        """A bar; yields what is called after each step with its loss."""
        columns = (
            TextColumn("  {task.description:<12}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[loss]}"),
        )
        with Progress(*columns, console=self._console, disable=self.quiet) as bar:
            task = bar.add_task(what, total=steps, loss="starting")
            yield lambda loss: bar.update(task, advance=1, loss=f"loss {loss:.4f}")

    def verdict(self, facts: dict[str, Any]) -> None:
        """One line that says it, and a table."""
        self._console.print()
        mark, mark_style = _MARKS[facts["status"]]
        self._tell(mark, verdict_text(facts), label_style=mark_style)
        checked = bool(facts["reference_losses"])
        rows = table("", _count(facts["world_size"], "rank"), *(["one device"] if checked else []))
        for row in summary(facts):
            rows.add_row(*(row if checked else row[:2]))
        self._console.print("", rows, "")
        self._tell("times", timing_text(facts), style="dim")
        self._tell("MFU", mfu_text(facts), style="dim")
        for note in facts["notes"]:
            self._tell("note", note)

    def report(self, folder: Path) -> None:
        """Where it lies."""
        self._console.print(f"report  {folder / 'report.html'}", markup=False)

    def profile(self, profile: dict[str, Any], report: Path | None) -> None:
        """Where the time of attention went, in a sentence, or in full where no file has it."""
        if report is None:
            from burst_portable.profiling.report.terminal import show

            show(profile, self._console)
            return
        from burst_portable.profiling.report.tables import ablation_text

        self._tell("time", profile["verdict"]["text"])
        if advice := profile["verdict"]["advice"]:
            self._tell("advice", advice)
        if ablated := ablation_text(profile):
            self._tell("ablated", ablated)
        self._console.print(f"profile {report / 'profile.html'}", markup=False)

    def _tell(self, label: str, text: str, *, indent: int = 0, style: str = "", label_style: str = "") -> None:
        """A word and what is told of it; on a terminal, further lines stand below the text."""
        begin = " " * indent + f"{label:<{_LABEL - 1}} "
        text = beside(begin, text, self._console.width if self._console.is_terminal else None)
        self._console.print(Text.assemble((begin, label_style), text), style=style)


def verdict_text(facts: dict[str, Any]) -> str:
    """The verdict as a sentence."""
    if facts["failures"]:
        return "; ".join(facts["failures"])
    what = _count(facts["steps"], _unit(facts["mode"] == "perplexity"))
    if facts["status"] == "unchecked":
        return f"{what} done; nothing was compared with one device"
    equal = "equals" if facts["steps"] == 1 else "equal"
    told = f"{what} {equal} one device's: losses within {facts['max_relative_difference']:.1e}"
    if (gradient := facts["gradient_relative_difference"]) is not None:
        told += f", final gradients within {gradient:.1e}"
    return f"{told} (relative, {facts['dtype']})"


def timing_text(facts: dict[str, Any]) -> str:
    """What times and rates are means of: one definition for all of them."""
    unit = _unit(facts["mode"] == "perplexity")
    steady = f"means over every {unit} but the first, which also warms up"
    which = f"those of the only {unit}, which also warms up" if facts["steps"] == 1 else steady
    return f"{which}; a {unit} is {facts['batch'] * facts['seq_len']:,} tokens, and takes what its slowest rank takes"


def mfu_text(facts: dict[str, Any]) -> str:
    """What the model FLOP utilization is the share of; where it is not known, why not."""
    peak, flops = facts["peak"], facts["model_flops_per_step"]
    if flops is None:
        return "unknown: of a mixture of experts a token meets some parameters only, and how many is not counted"
    if facts["mfu"] is None:
        return f"unknown: the device's peak in {peak['dtype']} is not known ({peak['source']})"
    needed = scaled(flops, "FLOP")
    most = f"{facts['world_size']} x {scaled(peak['flops'], 'FLOP/s')} in {peak['dtype']} ({peak['source']})"
    return f"{needed} that the model needs for a {_unit(facts['mode'] == 'perplexity')}, over what {most} do meanwhile"


def _unit(scoring: bool) -> str:
    return "batch" if scoring else "step"


def _count(number: int, unit: str) -> str:
    plural = "es" if unit == "batch" else "s"
    return f"{number:,} {unit}{'' if number == 1 else plural}"


def _travels(plan: Plan) -> str:
    """What goes where in each pass, in a few words."""
    if plan.call.ranks == 1:
        return "nothing travels"
    if plan.heads and plan.ring_size == 1:
        return "rows for heads, all to all"
    inside = f"rows for heads in nodes of {plan.head_parallel_size}; " if plan.heads else ""
    return inside + ", ".join(
        f"{name} {_SIDES[pass_plan.side]} {pass_plan.route.description}" for name, pass_plan in plan.passes()
    )


def summary(facts: dict[str, Any]) -> list[tuple[str, str, str]]:
    """Rows of (what, over ranks, on one device)."""
    alone = facts["reference_losses"]

    def both(what: str, mine: str, key: str, text: Callable[[Any], str]) -> tuple[str, str, str]:
        return what, mine, "-" if facts[key] is None else text(facts[key])

    rows = []
    if facts["mode"] == "perplexity":
        rows.append(both("perplexity", f"{facts['perplexity']:.8g}", "reference_perplexity", lambda x: f"{x:.8g}"))
    else:
        rows.append(("first loss", f"{facts['losses'][0]:.6f}", f"{alone[0]:.6f}" if alone else "-"))
        rows.append(("last loss", f"{facts['losses'][-1]:.6f}", f"{alone[-1]:.6f}" if alone else "-"))
    if alone:
        allowed = facts["tolerances"]
        rows.append(("losses differ by", f"{facts['max_relative_difference']:.2e}", f"allowed {allowed['loss']:.0e}"))
        if (gradient := facts["gradient_relative_difference"]) is not None:
            rows.append(("gradients differ by", f"{gradient:.2e}", f"allowed {allowed['gradient']:.0e}"))
            worst = facts["worst_gradient_relative_difference"]
            rows.append(("the worst of them by", f"{worst:.2e}", f"allowed {allowed['parameter']:.0e}"))
    rate = f"{facts['tokens_per_second']:,.0f}"
    rows.append(both("tokens a second", rate, "reference_tokens_per_second", lambda x: f"{x:,.0f}"))
    seconds = seconds_text(facts["seconds_per_step"])
    unit = _unit(facts["mode"] == "perplexity")
    rows.append(both(f"seconds a {unit}", seconds, "reference_seconds_per_step", seconds_text))
    share = facts["mfu"]
    rows.append(("model FLOP utilization", "unknown" if share is None else percent(share), "-"))
    rows.append(("peak memory a rank", bytes_text(max(facts["peak_memory_bytes"])), "-"))
    return rows
