"""Summarize a profile: name the bottleneck that is significant, from the differences between training steps."""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt
from statistics import mean, median, stdev

from burst_portable.profiling.analysis.bottlenecks import Bottleneck, Report, make_bottleneck, whole_time
from burst_portable.utils.text import percent, time_text

_REPORTED = 0.05  # of the time: the summary names no smaller bottleneck as the cause
_RECURRENT = 5.0  # standard errors: a rank or link that loses more than this does so in most steps
_MIN_STEPS = 4  # from which a standard error is computed
_LISTED = 3  # bottlenecks that the summary lists if it names none
_MUCH_IDLE = 0.2  # of all ranks' time: more idle time outside of attention is reported, though not as a bottleneck


def add_usual_shares(bottlenecks: list[Bottleneck], by_step: Sequence[tuple[float, list[Bottleneck]]]) -> None:
    """Add `usual_share`, `spread` and `standard_error` to each bottleneck.

    `by_step` has the time and the bottlenecks of each step.

    The usual share is the mean share of a step, without the step of the largest. It is smaller than `share` if one step
    lost most of the time, or each step another rank. The spread is the median difference of a step from the median
    step, as a share, if none had this bottleneck. The standard error is that of the mean share of a step.
    """
    for one in bottlenecks:
        kinds = ("late rank", "late ranks") if one["kind"] == "late ranks" else (one["kind"],)
        shares = [
            sum(b["share"] for b in found if b["kind"] in kinds and one["rank"] in (-1, b["rank"]))
            for _, found in by_step
        ]
        times = [time * (1 - share) for share, (time, _) in zip(shares, by_step, strict=True)]
        middle = median(times) if times else 0
        one["usual_share"] = min(one["share"], mean(sorted(shares)[:-1])) if len(shares) > 2 else one["share"]
        one["spread"] = median(abs(time - middle) for time in times) / middle if middle else 0.0
        one["standard_error"] = stdev(shares) / sqrt(len(shares)) if len(shares) >= _MIN_STEPS else one["share"]


def summarize(report: Report) -> Bottleneck:
    """Return the largest significant bottleneck with its text as sentences; if there is none, list the largest.

    A bottleneck is significant if it usually takes `_REPORTED` of a step, and more than steps differ by without it. If
    ranks waited longer for a core, it must also be a rank's or link's, and recur in most steps.
    """
    bottlenecks, core_wait = report["bottlenecks"], _core_wait(report)
    outside = _share(report, "idle_outside_attention_ns")
    worst = next((one for one in bottlenecks if _is_significant(one, core_wait)), None)
    if worst:
        text = f"{worst['text']}: {time_text(worst['lost_ns'])} lost, {percent(worst['share'])} of the time."
        if outside > max(_MUCH_IDLE, worst["share"]):
            text += f" {percent(outside)} is idle outside of attention, which this profile does not record."
        return {**worst, "text": text[0].upper() + text[1:]}
    copies = _share(report, "exposed_copy_ns")
    largest = ", ".join(map(_name, bottlenecks[:_LISTED]))
    text = (
        f"Nothing stands out{f'; the largest losses are: {largest}' if largest else ''}. "
        f"{percent(_share(report, 'compute_ns'))} of the time attention computes, "
        f"{percent(_share(report, 'exposed_comm_ns'))} is exposed communication, "
        f"{f'{percent(copies)} exposed copies, ' if copies else ''}"
        f"{percent(_share(report, 'idle_between_kernels_ns'))} idle between kernels, "
        f"{percent(outside)} idle outside of attention."
    )
    if core_wait > _REPORTED:
        text += f" The threads of a rank waited {percent(core_wait)} of the time for a core."
        return {**make_bottleneck("none", 0, text, _SHARED_CORES, ""), "share": 0.0}
    recommendation = (
        "profile a full step with torch.profiler: this profile does not record the rest of the model, the optimizer "
        "and the program; some idle time is expected, and more if processes share cores"
    )
    return {**make_bottleneck("none", 0, text, recommendation if outside > _MUCH_IDLE else "", ""), "share": 0.0}


_SHARED_CORES = (
    "the ranks share their cores with other threads, which delays kernels, messages and checks: use fewer ranks or "
    "threads, or end other processes, before you search for a cause"
)


def _is_significant(one: Bottleneck, core_wait: float) -> bool:
    usual: float = one["usual_share"]
    if usual < max(_REPORTED, one["spread"]):
        return False
    return usual > core_wait or bool(one["rank"] >= 0 and usual >= _RECURRENT * one["standard_error"])


def _core_wait(report: Report) -> float:
    """Return the mean time that a rank's threads waited for a core, as a share of the time; 0 if unknown."""
    waits, span = [rank["core_wait_ns"] or 0 for rank in report["ranks"]], whole_time(report)
    return mean(waits) / span if span else 0.0


def _name(one: Bottleneck) -> str:
    """Return a bottleneck's kind, rank or link, and share; and the spread of steps if the loss is within it."""
    rank, peer = one["rank"], one["peer"]
    is_within = _REPORTED <= one["usual_share"] < one["spread"]
    within = f" (steps differ by {percent(one['spread'])})" if is_within else ""
    where = f"{f' {rank}' if rank >= 0 else ''}{f' to {peer}' if peer >= 0 else ''}"
    return f"{one['kind']}{where} {percent(one['share'])}{within}"


def _share(report: Report, part: str) -> float:
    """Return the share of all ranks' time that a part of the partition takes."""
    span, took = (sum(rank[key] for rank in report["ranks"]) for key in ("span_ns", part))
    return took / span if span else 0.0
