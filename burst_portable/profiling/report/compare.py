"""Compare two reports: find parts of a training step that became slower by more than a threshold."""

from __future__ import annotations

from typing import Any, NamedTuple

from burst_portable.errors import InputError
from burst_portable.utils.text import scaled

COMPARED = ("span", "compute", "exposed_comm", "exposed_copy", "blocking", "idle")
_STEPS = ("shortest", "median", "longest")  # training steps, from mark to mark
_FLOOR = 0.01  # of the step: smaller changes are noise
_SAME_WORK = 0.01  # of the FLOPs: level "basic" keeps only the latest kernels, which may begin within a step
_WORK = {
    "seq_len": "tokens",
    "batch": "batch",
    "mask": "mask",
    "heads": "query heads",
    "kv_heads": "K/V heads",
    "head_dim": "head size",
    "itemsize": "bytes per element",
}
CAUTIONS = {
    "level": "recording costs a different time per level, so the profiler may cause part of a change",
    "device": "different devices, so a change does not show an effect of the code",
    "backend": "different backends, so a change may be that of another kernel or transport",
    "kernel": "different kernels, so a change in computing may be that of the kernel",
}
"""Differences that do not prevent a comparison, each with its possible effect."""


class Difference(NamedTuple):
    """A fact in which two reports differ."""

    name: str
    before: str
    after: str


class Change(NamedTuple):
    """The time of a part of a training step, or of the full step, in nanoseconds of the slowest rank."""

    name: str
    before: float
    after: float
    worse: bool

    @property
    def ratio(self) -> float:
        """After over before; infinite if there was nothing before."""
        return self.after / self.before if self.before else float("inf") if self.after else 1.0


def compare(before: dict[str, Any], after: dict[str, Any], threshold: float) -> list[Change]:
    """Return each part of a training step, and whether it grew by more than the threshold: 0.1 is a tenth.

    If both reports have marked steps, the shortest, the median and the longest full step follow. A part is worse only
    if it also grew by `_FLOOR` of the full step. Idle time, the shortest and the longest step are never worse: they
    show one step each, or time that attention does not cause.

    Raises:
        InputError: If the reports have different numbers of ranks or different work, or if the threshold is not a
            finite number of at least 0.
    """
    if not 0 <= threshold < float("inf"):  # a comparison with nan is always False
        raise InputError("the threshold is out of range", got=threshold, allowed="0 or more, 0.1 for a tenth")
    sizes = len(before["ranks"]), len(after["ranks"])
    if sizes[0] != sizes[1]:
        raise InputError("the reports have different numbers of ranks", got=f"{sizes[0]} and {sizes[1]}")
    _check_work(before, after)
    changes = []
    full = _step(before, "span")
    for name in COMPARED:
        old, new = _step(before, name), _step(after, name)
        grew = new - old > threshold * (full if name != "span" and old < _FLOOR * full else old)
        matters = new - old > _FLOOR * full
        changes.append(Change(name, old, new, name != "idle" and grew and matters))
    if before["training"] and after["training"]:
        for name in _STEPS:
            old, new = (data["training"][f"{name}_ns"] for data in (before, after))
            grew = new - old > max(threshold, _FLOOR) * old
            changes.append(Change(f"{name}_step", old, new, name == "median" and grew))
    return changes


def differences(before: dict[str, Any], after: dict[str, Any]) -> list[Difference]:
    """Return the differences other than times: sizes, strategy, layout, level, device, backend, kernel."""
    old, new = _about(before), _about(after)
    return [Difference(name, old[name], new[name]) for name in old if old[name] != new[name]]


def _about(data: dict[str, Any]) -> dict[str, str]:
    """Return the facts of a report as text; for several plans, every distinct value."""
    plans, names = data["plans"], {**_WORK, "strategy": "strategy", "layout": "layout"}
    devices = {data["device"], *(peak["device"] for peak in data["peaks"])} - {""}
    return {
        **{text: ", ".join(map(str, dict.fromkeys(plan[name] for plan in plans))) for name, text in names.items()},
        "level": data["level"],
        "device": ", ".join(sorted(devices)),
        "backend": data["backend"] or "unknown",
        "kernel": ", ".join(sorted(data["kernels"])) or "unknown",
    }


def _check_work(before: dict[str, Any], after: dict[str, Any]) -> None:
    """Raise if training steps have different FLOPs, which do not depend on the strategy or the layout."""
    flops = [_flops(data) for data in (before, after)]
    if abs(flops[1] - flops[0]) <= _SAME_WORK * max(flops):
        return
    found = differences(before, after)
    sizes = [f"{d.name} {d.before} and {d.after}" for d in found if d.name in _WORK.values()]
    raise InputError(
        "the reports are of different work and cannot be compared",
        got="; ".join([*sizes, f"{' and '.join(scaled(one, 'FLOP') for one in flops)} of attention per step"]),
        next_step="profile both with the same model, tokens and batch",
    )


def _flops(data: dict[str, Any]) -> float:
    """Return the FLOPs of attention's kernels on all ranks in a training step, by the exact number of pairs."""
    total = sum(one["flops"] for rank in data["ranks"] for one in rank["passes"].values())
    return float(total) / max(1, len(data["train_steps"]))


def _step(data: dict[str, Any], name: str) -> float:
    """Return a part of the slowest rank's training step, in nanoseconds."""
    steps = max(1, len(data["train_steps"]))
    slowest: int = max(rank[f"{name}_ns"] for rank in data["ranks"])
    return slowest / steps
