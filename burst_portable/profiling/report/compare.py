"""Two reports side by side: what became slower, by more than a threshold."""

from __future__ import annotations

from typing import Any, NamedTuple

from burst_portable.errors import InputError
from burst_portable.utils.text import scaled

WATCHED = ("span", "compute", "exposed_comm", "exposed_copy", "blocking", "idle")
_STEPS = ("shortest", "median", "longest")  # training steps, from mark to mark
_FLOOR = 0.01  # of the whole step: parts below this in both reports are noise

_SAME_WORK = 0.01  # of the FLOPs: the light level keeps the latest kernels only, which may begin within a step
_WORK = {  # facts of plans; comparisons are made for the rest of `differences`
    "seq_len": "tokens",
    "batch": "batch",
    "mask": "mask",
    "heads": "query heads",
    "kv_heads": "K/V heads",
    "head_dim": "head size",
    "itemsize": "bytes a number",
}
_CHOICES = {"strategy": "strategy", "layout": "layout"}
CAUTIONS = {
    "level": "levels cost different times of their own, so part of a change may be the profiler's",
    "device": "other devices, so a change says nothing of the code",
}
"""What differs, and yet is compared, with what that may mean."""


class Difference(NamedTuple):
    """A fact in which two reports differ."""

    name: str
    before: str
    after: str


class Change(NamedTuple):
    """A part of the time per training step, or all of one, in nanoseconds of the slowest rank, before and after."""

    name: str
    before: float
    after: float
    worse: bool

    @property
    def ratio(self) -> float:
        """After over before; infinite where there was nothing before."""
        return self.after / self.before if self.before else float("inf") if self.after else 1.0


def compare(before: dict[str, Any], after: dict[str, Any], threshold: float) -> list[Change]:
    """Each part of a training step, and whether it grew by more than the threshold (0.1: a tenth).

    Where both reports have steps that were marked, the shortest, the median and the longest follow, attention or not.

    A part counts as worse only where it grew by that share of the whole step too: a tenth more of nothing is nothing.
    Idle counts as nobody's and is shown alone, as are the shortest and the longest step, which are one step each;
    computing less is never worse.

    Raises `InputError` for reports of different numbers of ranks or of other work, or a threshold that is not a finite
    number of 0 or more.
    """
    if not 0 <= threshold < float("inf"):  # nothing would exceed nan or more
        raise InputError("the threshold is out of range", got=threshold, allowed="0 or more, 0.1 for a tenth")
    sizes = len(before["ranks"]), len(after["ranks"])
    if sizes[0] != sizes[1]:
        raise InputError("the reports are of different numbers of ranks", got=f"{sizes[0]} and {sizes[1]}")
    _check_work(before, after)
    changes = []
    whole = _step(before, "span")
    for name in WATCHED:
        old, new = _step(before, name), _step(after, name)
        grew = new - old > threshold * (whole if name != "span" and old < _FLOOR * whole else old)
        matters = new - old > _FLOOR * whole
        changes.append(Change(name, old, new, name != "idle" and grew and matters))
    return changes + _marked_steps(before, after, threshold)


def _marked_steps(before: dict[str, Any], after: dict[str, Any], threshold: float) -> list[Change]:
    """Empty where either report has none."""
    told = before.get("training"), after.get("training")
    if not told[0] or not told[1]:
        return []
    changes = []
    for name in _STEPS:
        old, new = told[0][name], told[1][name]
        grew = new - old > max(threshold, _FLOOR) * old
        changes.append(Change(f"{name}_step", old, new, name == "median" and grew))
    return changes


def differences(before: dict[str, Any], after: dict[str, Any]) -> list[Difference]:
    """What differs besides times: sizes, choices, level, device."""
    told = [_about(before), _about(after)]
    return [Difference(name, told[0][name], told[1][name]) for name in told[0] if told[0][name] != told[1][name]]


def _about(data: dict[str, Any]) -> dict[str, str]:
    """What a report is about, in words; for several plans, every distinct value."""
    plans, names = data["plans"], {**_WORK, **_CHOICES}
    level = "light" if data.get("light") else "deep" if data.get("traced") else "session"
    devices = {data["device"], *(peak["device"] for peak in data.get("peaks", ()))} - {""}
    return {
        **{told: ", ".join(map(str, dict.fromkeys(plan[name] for plan in plans))) for name, told in names.items()},
        "level": level,
        "device": ", ".join(sorted(devices)),
    }


def _check_work(before: dict[str, Any], after: dict[str, Any]) -> None:
    """Raise if training steps have different FLOPs: strategies and layouts only distribute them differently."""
    flops = [_flops(data) for data in (before, after)]
    if abs(flops[1] - flops[0]) <= _SAME_WORK * max(flops):
        return
    work = {*_WORK.values()}
    sizes = [f"{d.name} {d.before} and {d.after}" for d in differences(before, after) if d.name in work]
    raise InputError(
        "the reports are of other work, so that neither can be called slower",
        got="; ".join([*sizes, f"{' and '.join(scaled(one, 'FLOP') for one in flops)} of attention a step"]),
        next_step="profile both with the same model, tokens and batch",
    )


def _flops(data: dict[str, Any]) -> float:
    """FLOPs of attention's kernels on all ranks in a training step, by exact area."""
    total = sum(one["flops"] for rank in data["ranks"] for one in rank["passes"].values())
    return float(total) / max(1, len(data["iterations"]))


def _step(data: dict[str, Any], name: str) -> float:
    """A part of the slowest rank's training step, in nanoseconds."""
    steps = max(1, len(data["iterations"]))
    slowest: int = max(rank[name] for rank in data["ranks"])
    return slowest / steps
